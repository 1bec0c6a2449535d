"""Interface of backends: training of many adapters of one model, and sampling from them.

Methods depend only on their arguments and the model's earlier calls, not on co-batched models (float32 on a CPU: bit
for bit). So calls can be replayed after a crash with the same results."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from skyrl_gym.suggestions import did_you_mean
from tx.errors import ConfigError
from tx.tinker.types import AdamParams, Datum, LoraSpec, PassOutput, SampleOutput, SampleSpec, TrainingPass


def check_setting_names(names: Iterable[str], known: Iterable[str], error: type[Exception] = ConfigError) -> None:
    """Check the names in `backend_config`. Raises: `error` for an unknown one."""
    known = set(known)
    for name in names:
        if name not in known:
            raise error(f"unknown setting backend_config.{name}; {did_you_mean(name, sorted(known))}")


class BackendInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a backend."""

    name: str
    vocab_size: int
    max_context: int
    """Tokens of a prompt and its answer, and of a datum."""
    max_lora_rank: int
    can_train_unembed: bool = True
    max_resident_models: int = 64
    """Models in memory at a time; the engine puts the least recently used to disk."""
    pass_tokens: int = 2048
    """The engine joins micro-batches of several models to a pass of no more than so many tokens."""


@dataclass(frozen=True)
class Failure:
    """Failure of one model in a pass; none of its gradient was accumulated."""

    error: Exception
    """`ModelError` says whose fault it is; anything else is ours."""


class BackendLost(BaseException):
    """The backend cannot compute anything further; the text says why. The engine process exits, and the next one
    executes unfinished requests. Not an `Exception`, so that it is not handled as the failure of one request.
    """


class TrainingBackend(ABC):
    """Called from one thread."""

    @abstractmethod
    def info(self) -> BackendInfo:
        """Describe the backend and its limits."""

    @abstractmethod
    def create(self, model_id: str, lora: LoraSpec) -> None:
        """Create an adapter: A from the seed, B zero, fresh optimizer, no gradient."""

    @abstractmethod
    def forget(self, model_id: str) -> None:
        """Free the memory of a model. Unknown ids are ignored."""

    @abstractmethod
    def micro_batches(self, data: Sequence[Datum]) -> list[list[Datum]]:
        """Split a request into consecutive micro-batches, by length alone, the same every time."""

    @abstractmethod
    def run(self, passes: Sequence[TrainingPass]) -> list[PassOutput | Failure]:
        """Run one micro-batch of each of several models jointly. Gradients of the loss (a plain sum) are accumulated
        per model, unless `forward_only`. A model appears at most once.

        If it raises (for example out of memory), no gradient was accumulated; the caller retries each model alone."""

    @abstractmethod
    def copy_gradient(self, model_id: str) -> Any:
        """Copy the accumulated gradient for `put_gradient`; return None (or anything cheap) without a gradient. Called
        before a request of several micro-batches, since a failed request must have no effect.
        """

    @abstractmethod
    def put_gradient(self, model_id: str, gradient: Any) -> None:
        """Restore the accumulated gradient, bit for bit. The copy is not used again."""

    @abstractmethod
    def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        """Take one AdamW step with the accumulated gradient, and clear it. Without a gradient nothing changes. Returns
        metrics (`grad_norm:mean`, …).

        Raises:
            ModelError: a non-finite gradient, which is cleared, since no later step could use it; or a non-finite
                setting, moment or updated weight. Otherwise nothing has changed.
            Exception: nothing has changed.
        """

    @abstractmethod
    def save(self, model_id: str, folder: Path, *, state: bool) -> None:
        """Write the adapter as peft reads it (`adapter_config.json`, `adapter_model.safetensors`, float32) into an
        existing empty local folder; with `state` also optimizer, step count and accumulated gradient, bit for bit.
        """

    @abstractmethod
    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Load an adapter in place, with its optimizer if requested; otherwise the optimizer is reset. The accumulated
        gradient is cleared.

        Raises:
            ModelError: rank or layers differ, no optimizer there, damaged, not finite; the model is as before.
        """

    @abstractmethod
    def restore(self, model_id: str, lora: LoraSpec, folder: Path) -> None:
        """Restore a model exactly as `save(…, state=True)` wrote it, gradient included."""

    @abstractmethod
    def close(self) -> None:
        """Free all resources."""


class SamplingBackend(ABC):
    """Interface for sampling, called from one asyncio loop; every coroutine ends. Requests of all tenants are
    batched.
    """

    @abstractmethod
    async def start(self) -> None:
        """Start sampling; called once, before any request."""

    @abstractmethod
    async def sample(self, spec: SampleSpec, adapter: Path | None, *, tenant: str = "") -> SampleOutput:
        """Sample from an adapter's folder (written by `save`, immutable), or from the base model. Adapters are loaded
        on demand and evicted least recently used first. Waiting tenants are served in turn.

        Raises:
            ModelError: the adapter cannot be loaded, or the output was not finite.
            BackendLost: no further request will be completed.
        """

    @abstractmethod
    def num_running(self) -> int:
        """Return the number of requests in flight."""

    async def end_of_step(self) -> None:
        """Wait for the end of the current step, to detect hung steps. A backend that detects hangs itself returns
        immediately.

        Raises:
            BackendLost: no further request will be completed.
        """
        return

    @abstractmethod
    async def close(self) -> None:
        """Cancel all requests and free all resources."""


@dataclass(frozen=True)
class Backend:
    """Training and sampling of one base model."""

    training: TrainingBackend
    sampling: SamplingBackend
