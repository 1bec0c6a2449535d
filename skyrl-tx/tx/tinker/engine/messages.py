"""Messages between the API process and the engine process, besides commands. Arrays travel as protobuf bytes of the
wire (`wire.codec`).

The engine's memory is a copy: the database is authoritative, and a snapshot with the commands after it restores a
model."""

import msgspec
from loguru import logger

from tx.errors import ModelError, RequestError
from tx.tinker.backends.base import BackendInfo
from tx.tinker.commands import CreateModel, Load, Optimize, Sample, Save, Train, Unload
from tx.tinker.types import LoraSpec


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Restoration of a model from its snapshot, or as created if it has none. The commands after it follow, first those
    with `replay`.
    """

    model_id: str
    tenant: str
    lora: LoraSpec
    snapshot: str | None
    seq: int
    """The last seq that the snapshot contains; -1 with none."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cancellation of samples; unfinished ones report nothing. Training cannot be cancelled, since later commands build
    on it.
    """

    request_ids: list[str]


# ---- from the engine


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports that the engine takes commands."""

    info: BackendInfo


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Result of a command."""

    request_id: str
    result: bytes
    """`ForwardBackwardOutput` or `SampleResponse` of the wire; JSON for the others."""
    size_bytes: int = 0
    """Bytes written by a `Save`."""
    metrics: dict[str, float] = {}
    """Numbers of a pass or an optimizer step, as in `result`; `tokens` of a sample."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Failure of a command."""

    request_id: str
    error: str
    category: str
    """`user`, `server`"""

    @classmethod
    def of(cls, request_id: str, error: BaseException) -> "Failed":
        """Describe an error for the client; unexpected errors are logged."""
        if isinstance(error, ModelError):
            text, category = str(error), error.category
        elif isinstance(error, RequestError):
            text, category = str(error), "user"
        else:
            logger.opt(exception=error).error("a command failed unexpectedly")
            text = f"internal server error ({type(error).__name__}); see the server's log"
            category = "server"
        return cls(request_id=request_id, error=text, category=category)


class Snapshotted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A snapshot of the model after `seq` is complete in `folder`; the earlier one can be deleted once this is
    recorded. Sent after the results of all commands up to `seq`, and recorded after them. The engine deletes no
    reported snapshot, and may read the last one again."""

    model_id: str
    seq: int
    folder: str


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Statistics of the engine, sent each second."""

    queued_commands: int
    running_samples: int
    resident_models: int
    train_tokens: dict[str, int]
    """Number of trained tokens by tenant, since the start."""
    sample_tokens: dict[str, int]
    busy_seconds: float
    """Busy time of the training thread since the start."""
    turn_seconds: float = 0.0
    """Duration of the training thread's present turn (one pass and some quick commands); 0 while it waits."""
    step_seconds: float = 0.0
    """Duration of the present sampling step."""


FromApi = CreateModel | Train | Optimize | Save | Load | Unload | Sample | Restore | Cancel
FromEngine = Ready | Done | Failed | Snapshotted | EngineStats
