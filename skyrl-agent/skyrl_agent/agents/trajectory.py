"""One trajectory: the three stages of its life, and the record of how it ended. Knows no queue and no batch."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from skyrl_agent.config.task_file import TaskFile
from skyrl_agent.errors import InfraError, StageTimeout
from skyrl_agent.finish import CANCELLED, ERROR_AGENT, ERROR_EVALUATION, ERROR_RUNTIME, ending_of
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.types import Failure, InferBackend, Stage, TrajectoryResult


class BaseTrajectory(ABC):
    """What a dispatcher moves through its stages. It calls them in order, each at most once per attempt, never two at a
    time; `close` is called at the end whatever happened, after a cancellation too.

    Args:
        cfg: the task file.
        instance: the problem.
        trajectory_id: which of the instance's trajectories, in [0, num_trajectories).
        infer_engine: the model.
        tokenizer: of the model, as transformers has them.
        task: shared by all trajectories of the runner; keeps no state of one.
        sampling_params: those of the batch (training or evaluation).
    """

    def __init__(
        self,
        cfg: TaskFile,
        instance: Instance,
        trajectory_id: int,
        infer_engine: InferBackend,
        tokenizer: Any,
        task: BaseTask,
        sampling_params: dict[str, Any],
        val_mode: bool = False,
    ) -> None:
        self.cfg, self.instance, self.trajectory_id = cfg, instance, trajectory_id
        self.infer_engine, self.tokenizer, self.task = infer_engine, tokenizer, task
        self.sampling_params, self.val_mode = sampling_params, val_mode
        self.environment: Any = None
        """Of `async_fix_pool`: what the dispatcher lent it for its life."""
        self.result = self.blank_result()

    @classmethod
    def check(cls, cfg: TaskFile, task: BaseTask) -> None:
        """Called once, before anything starts. Raises ConfigError for what a task file asks of the agent in vain."""
        return

    @classmethod
    def probes(cls, cfg: TaskFile, task: BaseTask, instances: Sequence[Instance]) -> list[Coroutine[Any, Any, None]]:
        """Checks of what trajectories of these instances stand on, to be awaited before a run. Each may raise
        InfraError."""
        return [task.probe()]

    def blank_result(self) -> TrajectoryResult:
        return TrajectoryResult(
            instance_id=self.instance.instance_id,
            trajectory_id=self.trajectory_id,
            data_source=self.instance.data_source,
        )

    @abstractmethod
    async def initialize_trajectory(self) -> None:
        """Makes the runtime."""

    @abstractmethod
    async def generate_trajectory(self) -> None:
        """Runs the agent; sets the result's transitions, messages, results and finish reason, and gives the agent's
        runtime back: evaluation makes its own."""

    @abstractmethod
    async def evaluate_trajectory(self) -> None:
        """Sets the reward. Called only where `ending_of(finish_reason).evaluated`."""

    async def close(self) -> None:
        """Gives everything back. May be called more than once; never raises."""
        return

    async def restart(self) -> None:
        """Forgets the attempt that failed in `generate`, so that the stages may begin anew."""
        await self.close()
        self.result = self.blank_result()

    @property
    def failed(self) -> bool:
        return self.result.failure is not None

    def fail(self, stage: Stage, error: BaseException, attempts: int = 1) -> None:
        """Records what ended it. The first failure stays."""
        if self.failed:
            return
        cancelled = isinstance(error, asyncio.CancelledError)
        infrastructure = cancelled or isinstance(error, InfraError | StageTimeout | OSError)
        kind = "infrastructure" if infrastructure else "reward" if stage == "evaluate" else "environment"
        message = "the run was stopped before it ended" if cancelled else f"{type(error).__name__}: {error}"
        self.result.failure = Failure(stage, kind, message, attempts)
        self.result.reward = None
        if cancelled:
            self.result.finish_reason = CANCELLED
        elif stage == "evaluate":
            self.result.finish_reason = ERROR_EVALUATION
        else:
            self.result.finish_reason = ERROR_RUNTIME if infrastructure else ERROR_AGENT

    @property
    def wants_evaluation(self) -> bool:
        return not self.failed and ending_of(self.result.finish_reason).evaluated
