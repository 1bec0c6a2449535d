"""Base class of trajectories: three stages, and the record of the end. Independent of queues and batches."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

from skyrl_agent.config.task_file import TaskFile
from skyrl_agent.errors import InfraError, StageTimeout
from skyrl_agent.finish import CANCELLED, ERROR_AGENT, ERROR_EVALUATION, ERROR_RUNTIME, get_ending
from skyrl_agent.tasks.base import BaseTask, Instance
from skyrl_agent.types import Failure, InferBackend, JsonObject, Stage, Tokenizer, TrajectoryResult


class BaseTrajectory(ABC):
    """Trajectory with three stages, which a dispatcher calls in order, each at most once per attempt, never two at a
    time; `close` is called at the end in any case, after a cancellation too.

    Args:
        cfg: the task file.
        instance: the problem.
        trajectory_id: index among the instance's trajectories, in [0, num_trajectories).
        infer_engine: the model.
        tokenizer: transformers tokenizer of the model.
        task: shared by all trajectories of the runner, without state of any.
        sampling_params: sampling parameters of the batch (training or evaluation).
    """

    def __init__(
        self,
        cfg: TaskFile,
        instance: Instance,
        trajectory_id: int,
        infer_engine: InferBackend,
        tokenizer: Tokenizer,
        task: BaseTask,
        sampling_params: JsonObject,
        val_mode: bool = False,
    ) -> None:
        self.cfg, self.instance, self.trajectory_id = cfg, instance, trajectory_id
        self.infer_engine, self.tokenizer, self.task = infer_engine, tokenizer, task
        self.sampling_params, self.val_mode = sampling_params, val_mode
        self.environment: Any = None
        """Environment from the pool of `async_fix_pool`."""
        self.session_id = uuid.uuid4().hex
        """`request_id` of the agent's requests; another one in each attempt."""
        self.result = self.build_blank_result()

    @classmethod
    def check(cls, cfg: TaskFile, task: BaseTask) -> None:
        """Check the task file before anything starts. Raises ConfigError for settings that the agent cannot satisfy."""
        return

    @classmethod
    def probes(
        cls, cfg: TaskFile, task: BaseTask, instances: Sequence[Instance]
    ) -> list[Coroutine[object, None, None]]:
        """Return checks of the services that trajectories of these instances need, to be awaited before a run. Each may
        raise InfraError."""
        return [task.probe()]

    def build_blank_result(self) -> TrajectoryResult:
        """Build a result without an outcome."""
        return TrajectoryResult(
            instance_id=self.instance.instance_id,
            trajectory_id=self.trajectory_id,
            data_source=self.instance.data_source,
        )

    @abstractmethod
    async def initialize_trajectory(self) -> None:
        """Create the runtime."""

    @abstractmethod
    async def generate_trajectory(self) -> None:
        """Run the agent; set the result's transitions, messages, results and finish reason; close the agent's runtime
        (evaluation creates its own)."""

    @abstractmethod
    async def evaluate_trajectory(self) -> None:
        """Grade the result. Called only if `get_ending(finish_reason).evaluated`."""

    async def close(self) -> None:
        """Release all resources. May be called more than once; never raises."""
        return

    async def restart(self) -> None:
        """Discard the attempt that failed in `generate`, so that the stages may be repeated."""
        await self.close()
        self.session_id, self.result = uuid.uuid4().hex, self.build_blank_result()

    @property
    def failed(self) -> bool:
        return self.result.failure is not None

    def fail(self, stage: Stage, error: BaseException, attempts: int = 1) -> None:
        """Record the failure that ended it. The first failure stays."""
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
        return not self.failed and get_ending(self.result.finish_reason).evaluated
