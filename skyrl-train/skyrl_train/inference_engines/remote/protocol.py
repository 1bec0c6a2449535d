"""Interface between a remote engine and a kind of server; implemented for vLLM and SGLang in separate files."""

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

NO_STREAMS = "this client does not stream responses of servers"


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Facts reported by a server."""

    info: EngineInfo
    names: tuple[str, ...]
    """Names of the served model."""
    prefix_caching: bool = True


class ServerProtocol(ABC):
    """Routes of one server. Stateless except for the facts that the server reported."""

    tokenizer_option = "--tokenizer"
    """Command-line option of the server for the tokenizer."""

    aborts_while_paused = True
    """True if an abort ends requests kept by a pause. If not, they end one token after the resume."""

    def __init__(self, connection: ServerConnection, request_timeout_seconds: float):
        self.server = connection
        self.request_timeout_seconds = request_timeout_seconds

    @staticmethod
    @abstractmethod
    def is_served_by(said: Mapping[str, object]) -> bool:
        """Return whether these responses of /version and /model_info come from this kind of server."""

    @staticmethod
    @abstractmethod
    def start_command(model: str, url: str) -> str:
        """Return the command that starts a server of this kind with `model` at `url`."""

    @abstractmethod
    async def get_facts(self) -> ServerFacts: ...

    @abstractmethod
    async def check_health(self) -> None:
        """Return when the server responds. The caller sets the deadline."""

    @abstractmethod
    async def complete(
        self,
        prompt: list[int],
        params: EngineSamplingParams,
        seed: SeedPair | None,
        adapter: str | None,
        cache_key: str,
    ) -> Completion:
        """Generate one completion.

        Args:
            adapter: the adapter's name at the server.
            cache_key: prefixes are shared only between requests with the same key.
        """

    @abstractmethod
    async def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Pause generation; later requests wait at the server."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def is_paused(self) -> bool: ...

    @abstractmethod
    async def abort(self) -> None:
        """Abort all requests at the server; each returns its tokens so far."""

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
        """Apply the received weights as `version`."""

    @abstractmethod
    async def load_adapter(self, name: str, path: str, version: int) -> dict[str, int]:
        """Load an adapter from a folder under this name. Returns the fingerprint of every tensor in its file: of the
        server's copy if it can report it, otherwise of the file.

        Raises:
            WeightSyncError: no adapter in the folder, or rejected by the server.
        """

    @abstractmethod
    async def unload_adapter(self, name: str) -> None: ...

    @abstractmethod
    async def list_adapters(self) -> list[str]:
        """List the adapters' names at the server."""


def parse_version(said: Any, url: str) -> int:
    """Parse a server's weight version; both kinds start with `default`."""
    if said in (None, "default"):
        return 0
    try:
        return int(said)
    except ValueError:
        raise WorkerError(
            f"the server at {url} reports weight version {said!r}, which is not a number: restart it, or set the "
            "version with POST /update_weight_version"
        ) from None


def parse_token_versions(spans: list[JsonObject] | None, num_tokens: int, url: str) -> list[int]:
    """Parse `[{version, start, end}]` to one version per token."""
    versions = [parse_version(span["version"], url) for span in spans or [] for _ in range(span["start"], span["end"])]
    if len(versions) != num_tokens:
        raise WorkerError(f"the server at {url} reported weight versions of {len(versions)} of {num_tokens} tokens")
    return versions


def read_vocab_size(model: str, url: str) -> int:
    """Read the vocabulary size from the config of the server's model, which must be readable locally.

    Raises:
        ConfigError: not readable.
    """
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config().vocab_size
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generator.remote_inference_engine_urls: the server at {url} serves {model}, whose config.json cannot be "
            f"read here ({str(error).splitlines()[0]}), so its vocabulary is unknown. Serve the model under a path or "
            "name that is available on this machine"
        ) from error
