"""Base class of tasks: instruction, runtime, and evaluation of the result. Independent of agents and models."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_agent.errors import TaskRowError
from skyrl_agent.finish import FINISH
from skyrl_agent.runtimes.base import Runtime, RuntimeSpec
from skyrl_agent.types import Message, Row, TrajectoryResult


class _Fields(dict[str, Any]):
    """Row in which a missing field is an error that names the row and the fields that it has."""

    def __init__(self, row: Row, instance_id: str) -> None:
        super().__init__(row)
        self._instance_id = instance_id

    def __missing__(self, field: str) -> Any:
        raise TaskRowError(
            f"row {self._instance_id} has no field {field!r}; it has: {', '.join(map(str, self)) or 'none'}. Add it "
            "to the rows, or set data.instance_key to the field that contains it"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Fields, (dict(self), self._instance_id)


@dataclass(frozen=True)
class Instance:
    """One problem, as a task reads it.

    Example:
        >>> instance = Instance({"question": "2 + 3", "answer": 5}, "7", "sums")
        >>> instance.row["question"]
        '2 + 3'
        >>> instance.row["solution"]
        Traceback (most recent call last):
        skyrl_agent.errors.TaskRowError: row 7 has no field 'solution'; it has: question, answer. ...
    """

    row: Row
    """Dataset row, or its part named by `data.instance_key`."""
    instance_id: str
    data_source: str = "default"

    def __post_init__(self) -> None:
        if isinstance(self.row, Mapping):  # data.instance_key may select another part of the row
            object.__setattr__(self, "row", _Fields(self.row, self.instance_id))


@dataclass(frozen=True)
class Judgement:
    """Reward and its components."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    """Finish reason that replaces the agent's, such as `no_git_patch`. None: the agent's holds."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Obstacles for which tests were not run -> details. The reward then holds only if the agent's changes are to blame
    (`BaseTask.recheck`)."""


class BaseTask:
    """Subclasses are made with the keywords of `task_config`; a method they do not need keeps its default.

    An outage (judge unavailable, sandbox removed) is raised as `InfraError` and retried; a row that cannot be used as
    `TaskRowError`. Neither is ever a reward of 0.
    """

    make_environment: Callable[[int], Awaitable[object]] | None = None
    """(place) -> an environment that `async_fix_pool` lends to one trajectory at a time; none: the task has none."""
    close_environment: Callable[[Any], Awaitable[None]] | None = None
    tools: Sequence[str] = ()
    """Tools of an agent if the task file names none."""

    def check_row(self, instance: Instance) -> None:
        """Raises TaskRowError before anything starts."""

    async def probe(self) -> None:
        """Check services needed for grading (a judge's server) before a run. Raises InfraError."""

    async def probe_runtime(self, instance: Instance, runtime: Runtime) -> None:
        """Check what grading needs inside a runtime, before a run. Raises InfraError.

        Args:
            runtime: a local one of `runtime_spec`.
        """

    def get_instruction(self, instance: Instance) -> list[Message]:
        """Return the initial messages: usually a system message and the problem."""
        raise NotImplementedError

    def runtime_spec(self, instance: Instance) -> RuntimeSpec | None:
        """Return the agent's runtime; None: it needs none. The task file's `runtime` section overrides it."""
        return None

    async def initialize_runtime(self, instance: Instance, runtime: Runtime) -> None:
        """Prepare a started runtime for the agent."""

    async def complete_runtime(self, instance: Instance, runtime: Runtime, result: Any) -> Any:
        """Collect the result to evaluate (a patch, files) before the runtime closes. Replaces the agent's final
        response.
        """
        return result

    def evaluation_runtime_spec(self, instance: Instance) -> RuntimeSpec | None:
        """Return the specification of a fresh runtime for `evaluate_result`; None: it needs none."""
        return None

    async def evaluate_result(
        self, result: Any, instance: Instance, trajectory: TrajectoryResult, runtime: Runtime | None = None
    ) -> Judgement | float:
        """Grade a result. `runtime` is a started one of `evaluation_runtime_spec`; the caller closes it."""
        raise NotImplementedError

    def solution(self, instance: Instance) -> Any | None:
        """Return the row's own solution, as `complete_runtime` returns an agent's; None if the row has none."""
        return None

    async def evaluate_original(self, instance: Instance, runtime: Runtime) -> Judgement:
        """Grade the unchanged instance. `not_run` lists only obstacles that no change by an agent could remove.

        Args:
            runtime: a fresh runtime of `evaluation_runtime_spec`, or of `runtime_spec` if that is None.
        """
        raise NotImplementedError

    async def recheck(self, instance: Instance, judgement: Judgement, runtime: Runtime) -> Judgement:
        """Decide whether tests that were not run count against the agent: they do if they run without its changes.

        Args:
            runtime: as for `evaluate_original`.

        Raises:
            TaskRowError: they do not, so the agent cannot be graded.
        """
        if (solution := self.solution(instance)) is not None:
            solved = TrajectoryResult(finish_reason=FINISH, results=solution)
            again = await self.evaluate_result(solution, instance, solved, runtime)
            if (again.reward if isinstance(again, Judgement) else again) > judgement.reward:
                return judgement
            tree = "with the row's reference solution"
        else:
            original = await self.evaluate_original(instance, runtime)
            if any(obstacle not in original.not_run for obstacle in judgement.not_run):
                return judgement
            tree = "on the original files"
        name, details = next(iter(judgement.not_run.items()))
        raise TaskRowError(
            f"{type(self).__name__}, row {instance.instance_id}: tests were not run: {name} ({details}). They do not "
            f"pass or run {tree} either, so the agent cannot be graded; `python -m skyrl_agent.validate` checks the "
            "rows of a task"
        )


__all__ = ["BaseTask", "Instance", "Judgement", "TaskRowError"]
