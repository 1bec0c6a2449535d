"""Errors of this package, by who can fix them. Imports nothing of ours but the gym's."""

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
    """Base of the errors this package raises on purpose. `InfraError` (of skyrl_gym) stands beside it: what an episode
    stands on did not work, which says nothing about what the model did, and is worth another try."""


class ConfigError(AgentError, ValueError):
    """A key of a task file is unknown, contradictory or impossible. The text names the key, its value, the rule and
    the likely fix."""


class TaskRowError(AgentError, ValueError):
    """A dataset row lacks a field or misuses one. The text names the task, the field and the rule."""


class BackendError(AgentError):
    """The model's server refused a request for a reason that another try does not change."""


class UnavailableError(AgentError):
    """Something that a run needs does not answer or does not work here. Nothing was started. The text names each
    setting that leads to it."""


class BatchFailedError(AgentError):
    """Every trajectory of a batch failed, so that there is no reward at all. The text names the commonest cause."""


class StageTimeout(AgentError, TimeoutError):
    """A stage of a trajectory did not end within its deadline."""
