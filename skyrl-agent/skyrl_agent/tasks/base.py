"""What a task is: what an agent is told, where it works, and how its result is judged. Knows no agent, no model."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_agent.errors import TaskRowError
from skyrl_agent.runtimes.base import Runtime, RuntimeSpec
from skyrl_agent.types import Message, Row, TrajectoryResult


@dataclass(frozen=True)
class Instance:
    """One problem, as a task reads it."""

    row: Row
    """What `data.instance_key` names, or the whole row."""
    instance_id: str
    data_source: str = "default"


@dataclass(frozen=True)
class Judgement:
    """A reward and what it is made of."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    """Where judging finds another ending than the agent saw: `no_git_patch`."""


class BaseTask:
    """Subclasses are made with the keywords of `task_config`; a method they do not need keeps its default.

    An outage (judge away, sandbox gone) is raised as `InfraError` and tried again; a row that cannot be used as
    `TaskRowError`. Neither is ever a reward of 0.
    """

    make_environment: Callable[[int], Awaitable[Any]] | None = None
    """(place) -> an environment that `async_fix_pool` lends to one trajectory at a time; none: the task has none."""
    close_environment: Callable[[Any], Awaitable[None]] | None = None
    tools: Sequence[str] = ()
    """What an agent gets where the task file names no tools."""

    def check_row(self, instance: Instance) -> None:
        """Raises TaskRowError before anything starts."""

    def get_instruction(self, instance: Instance) -> list[Message]:
        """The messages an agent starts from: usually a system message and the problem."""
        raise NotImplementedError

    def runtime_spec(self, instance: Instance) -> RuntimeSpec | None:
        """Where the agent works; None: nowhere. The task file's `runtime` section is laid over it."""
        return None

    async def initialize_runtime(self, instance: Instance, runtime: Runtime) -> None:
        """Makes a started runtime ready for the agent."""

    async def complete_runtime(self, instance: Instance, runtime: Runtime, result: Any) -> Any:
        """What there is to judge, taken from the runtime before it closes (a patch, files). Replaces the result."""
        return result

    def evaluation_runtime_spec(self, instance: Instance) -> RuntimeSpec | None:
        """A fresh runtime for `evaluate_result`; None: it needs none."""
        return None

    async def evaluate_result(
        self, result: Any, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement | float:
        """The reward. `runtime` is that of `evaluation_runtime_spec`, started, and closed by the caller."""
        raise NotImplementedError


__all__ = ["BaseTask", "Instance", "Judgement", "TaskRowError"]
