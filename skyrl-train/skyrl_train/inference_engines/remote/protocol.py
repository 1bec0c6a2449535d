"""Interface between a remote engine and a kind of server; vLLM's and SGLang's are in files of their own."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from skyrl_train.errors import ConfigError, WorkerError
from skyrl_train.inference_engines.base import EngineInfo, PauseMode
from skyrl_train.inference_engines.native.requests import EngineSamplingParams, SeedPair
from skyrl_train.inference_engines.remote.connection import ServerConnection
from skyrl_train.inference_engines.request import Completion
from skyrl_train.types import JsonObject
from skyrl_train.weight_sync.base import WeightReport, WeightSyncInitInfo, WeightUpdateRequest

NO_STREAMS = "this client asks servers for whole answers"


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Facts that a server reports of itself."""

    info: EngineInfo
    names: tuple[str, ...]
    """Names under which it serves its model."""
    prefix_caching: bool = True


class ServerProtocol(ABC):
    """One server's routes. Stateless but for what the server said of itself."""

    tokenizer_option = "--tokenizer"
    """Option of the server's command that names a tokenizer."""

    aborts_while_paused = True
    """True if an abort ends requests that a pause keeps. If not, they end one token after the resume."""

    def __init__(self, connection: ServerConnection, request_timeout_seconds: float):
        self.server = connection
        self.request_timeout_seconds = request_timeout_seconds

    @staticmethod
    @abstractmethod
    def is_served_by(said: Mapping[str, object]) -> bool:
        """Return whether a server of this kind gave these answers at /version and /model_info."""

    @staticmethod
    @abstractmethod
    def start_command(model: str, url: str) -> str:
        """Return a command that starts such a server of `model` at `url`."""

    @abstractmethod
    async def get_facts(self) -> ServerFacts: ...

    @abstractmethod
    async def check_health(self) -> None:
        """Return when the server answers, however long it takes: the caller decides how long silence may last."""

    @abstractmethod
    async def complete(
        self,
        prompt: list[int],
        params: EngineSamplingParams,
        seed: SeedPair | None,
        adapter: str | None,
        cache_key: str,
    ) -> Completion:
        """Continue one prompt.

        Args:
            adapter: the adapter's name at the server.
            cache_key: prefixes are shared with requests of the same key alone.
        """

    @abstractmethod
    async def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Requests that come later wait at the server."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def is_paused(self) -> bool: ...

    @abstractmethod
    async def abort(self) -> None:
        """Every request at the server returns what it has."""

    @abstractmethod
    async def sleep(self, level: int) -> None: ...

    @abstractmethod
    async def wake_up(self, tags: list[str]) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self) -> None: ...

    @abstractmethod
    async def get_weight_version(self) -> int: ...

    @abstractmethod
    async def init_weight_transfer(self, info: WeightSyncInitInfo) -> None: ...

    @abstractmethod
    async def update_weights(self, request: WeightUpdateRequest) -> None: ...

    @abstractmethod
    async def apply_weights(self, version: int) -> WeightReport:
        """Take on `version`."""

    @abstractmethod
    async def load_adapter(self, name: str, path: str, version: int) -> dict[str, int]:
        """Load an adapter from a folder under this name. Returns the fingerprint of every tensor in its file: as the
        server holds it where it can tell, else as it is in the file.

        Raises:
            WeightSyncError: the folder holds no adapter, or one that the server does not take.
        """

    @abstractmethod
    async def unload_adapter(self, name: str) -> None: ...

    @abstractmethod
    async def list_adapters(self) -> list[str]:
        """Names at the server."""


def parse_version(said: Any, url: str) -> int:
    """Our number from a server's word for its weights' version; `default` is what both kinds start with."""
    if said in (None, "default"):
        return 0
    try:
        return int(said)
    except ValueError:
        raise WorkerError(
            f"the server at {url} says that its weights have version {said!r}; versions are numbers here: "
            "start it again, or set its version by POST /update_weight_version"
        ) from None


def parse_token_versions(spans: list[JsonObject] | None, num_tokens: int, url: str) -> list[int]:
    """Each token's version from `[{version, start, end}]`."""
    versions = [parse_version(span["version"], url) for span in spans or [] for _ in range(span["start"], span["end"])]
    if len(versions) != num_tokens:
        raise WorkerError(f"the server at {url} gave versions for {len(versions)} of {num_tokens} tokens")
    return versions


def read_vocab_size(model: str, url: str) -> int:
    """Read the vocabulary size from the config of the server's model, which must be readable here.

    Raises:
        ConfigError: it is not.
    """
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generator.remote_inference_engine_urls: the server at {url} serves {model}, whose config.json cannot be "
            f"read here ({str(error).splitlines()[0]}); its vocabulary must be known. Serve the model under a path or "
            "a name that this machine knows as well"
        ) from error
