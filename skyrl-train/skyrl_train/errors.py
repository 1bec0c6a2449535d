"""Errors that speak to the person who can fix them. Imports nothing of ours.

A wrong setting is a `ConfigError` before anything starts. What ends one rollout is a `RolloutError`, which the
generator records on the trajectory (see `FailureKind`); what ends a run is one of the others.
"""

from typing import Literal


class SkyRLError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(SkyRLError, ValueError):
    """A setting is unknown, contradictory or impossible. The text names the setting, its value, the rule and the
    likely fix."""


class DataError(SkyRLError, ValueError):
    """A dataset cannot be used: a missing column, an unreadable file, no row left after filtering."""


class AllRolloutsFailedError(SkyRLError):
    """Failure of every rollout of a batch: there is nothing to train on or to score. The text has the commonest
    cause."""


class CheckpointError(SkyRLError):
    """A checkpoint cannot be written or read: a full disk, a missing or altered file."""


class WorkerError(SkyRLError):
    """A process of ours died, raised, or did not answer before its deadline. The text carries the end of its log."""


class WorkerMemoryError(WorkerError):
    """A process of ours ran out of memory, or was killed as the kernel kills when memory is short."""


class NonFiniteUpdateError(SkyRLError):
    """Optimizer steps were skipped one after the other because their gradients were not finite. The text says what was
    not."""


class RolloutGapError(SkyRLError):
    """The log-probs of rollouts are not those of the trainer's policy, by far more than staleness explains."""


class WeightSyncError(SkyRLError):
    """An engine's weights are not the trainer's after a sync (checksum), or the transfer failed."""


class UnsupportedByEngine(SkyRLError):
    """A rollout engine was asked for something that it does not have (`EngineInfo.unsupported` says why)."""


FailureKind = Literal["model", "tool", "environment", "reward", "infrastructure"]
"""The boundary that a failed rollout crossed."""


class RolloutError(SkyRLError):
    """Failure of one rollout. Ends that trajectory, never the batch.

    Args:
        kind: which boundary failed.
        message: what happened, for a person.
    """

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind: FailureKind = kind

    def __reduce__(self) -> tuple[type["RolloutError"], tuple[FailureKind, str], dict[str, object]]:
        """Pickle with the kind: an exception is otherwise rebuilt from its `args`, which lack it."""
        return type(self), (self.kind, str(self)), self.__dict__
