"""Errors with messages for the person who can fix them. Imports no module of this project.

An invalid setting is a `ConfigError` before anything starts. A `RolloutError` ends one rollout; the generator records
it on the trajectory (see `FailureKind`). The other errors end the run.
"""

from typing import Literal


class SkyRLError(Exception):
    """Base of all errors that this package raises deliberately."""


class ConfigError(SkyRLError, ValueError):
    """Unknown, contradictory or impossible setting. The message names the setting, its value, the rule and the likely
    fix."""


class DataError(SkyRLError, ValueError):
    """Unusable dataset: a missing column, an unreadable file, or no rows left after filtering."""


class AllRolloutsFailedError(SkyRLError):
    """Failure of every rollout of a batch, which leaves nothing to train on or to score. The message has the most
    common cause."""


class CheckpointError(SkyRLError):
    """Checkpoint that cannot be written or read: a full disk, a missing or altered file."""


class WorkerError(SkyRLError):
    """Crash, error or timeout of a worker process. The message includes the end of its log."""


class WorkerMemoryError(WorkerError):
    """Worker process that ran out of memory, or was probably killed by the kernel for lack of memory."""


class DiagnosticError(SkyRLError):
    """Failure of training that the metrics show, with `trainer.on_diagnostic=stop`. The message has the evidence."""


class NonFiniteUpdateError(SkyRLError):
    """Too many consecutive optimizer steps skipped because of non-finite gradients. The message names the first
    non-finite quantity."""


class RolloutGapError(SkyRLError):
    """Difference between log-probs of rollouts and trainer that is far larger than staleness explains."""


class WeightSyncError(SkyRLError):
    """Failed weight transfer, or an engine whose weights differ from the trainer's after a sync (checksum)."""


class UnsupportedByEngine(SkyRLError):
    """Request for a feature that a rollout engine does not have (`EngineInfo.unsupported` has the reason)."""


FailureKind = Literal["model", "tool", "environment", "reward", "infrastructure"]
"""The boundary that a failed rollout crossed."""


class RolloutError(SkyRLError):
    """Failure of one rollout. Ends that trajectory, never the batch.

    Args:
        kind: component that failed.
        message: human-readable description.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind: FailureKind = kind

    def __reduce__(self) -> tuple[type["RolloutError"], tuple[FailureKind, str], dict[str, object]]:
        """Pickle with the kind, which is not in `args`, from which exceptions are otherwise rebuilt."""
        return type(self), (self.kind, str(self)), self.__dict__
