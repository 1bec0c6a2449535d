"""Errors of this package, by who can fix them. Imports no other package of this repository than the gym."""

from skyrl_gym.error import InfraError

__all__ = [
    "AgentError",
    "BackendError",
    "BatchFailedError",
    "ConfigError",
    "InfraError",
    "StageTimeout",
    "TaskRowError",
    "UnavailableError",
]


class AgentError(Exception):
    """Base class of this package's errors. Not a base of skyrl_gym's `InfraError`: that reports infrastructure
    failures, which are unrelated to the model's behaviour and may be retried.
    """


class ConfigError(AgentError, ValueError):
    """A key of a task file is unknown, contradictory or impossible. The text names the key, its value, the rule and
    the likely fix."""


class TaskRowError(AgentError, ValueError):
    """A field of a dataset row is missing or invalid. The text names the task, the field and the rule."""


class BackendError(AgentError):
    """The model's server refused a request for a reason that another try does not change."""


class UnavailableError(AgentError):
    """A service or program that a run requires is unavailable. Nothing was started. The text names each setting that
    leads to it.
    """


class BatchFailedError(AgentError):
    """All trajectories of a batch failed, so it has no rewards. The message names the most common cause."""


class StageTimeout(AgentError, TimeoutError):
    """A stage of a trajectory did not end within its deadline."""
