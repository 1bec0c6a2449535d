"""Interface of generators: prompts in, trajectories out, in the same order. Independent of engines and environments."""

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from skyrl_train.inference_engines.base import SamplingKeywords
from skyrl_train.rollouts.adapter import GeneratorOutput, to_rollout_batch
from skyrl_train.rollouts.metrics import MetricsOutput
from skyrl_train.rollouts.types import Failure, RolloutBatch, Trajectory, TrajectoryGroup, TrajectoryID
from skyrl_train.types import ConversationType, MessageType

__all__ = [
    "BatchMetadata",
    "ConversationType",
    "Failure",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "MessageType",
    "MetricsOutput",
    "TrajectoryID",
]

TrainingPhase = Literal["train", "eval"]


@dataclass(frozen=True)
class BatchMetadata:
    """Purpose of a batch, its sampling seed, and the weight version that samples it."""

    global_step: int | None
    """Training step that asks; None outside of training."""

    training_phase: TrainingPhase

    sampling_seed: int | None = None
    """Number that, with `generator.seed`, the phase and the names of its samples, seeds every draw of this batch: a
    batch with the same number is sampled the same. None: `global_step`."""

    weight_version: int | None = None
    """Version of the weights that the engines should have by now; None if they have received none."""

    @property
    def seed(self) -> int | None:
        """Number that seeds this batch."""
        return self.global_step if self.sampling_seed is None else self.sampling_seed


class GeneratorInput(TypedDict):
    """B conversations; a prompt sampled n times occurs at n consecutive positions."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: NotRequired[list[dict[str, Any]] | None]
    sampling_params: NotRequired[SamplingKeywords | None]
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    batch_metadata: NotRequired[BatchMetadata | None]
    on_group: NotRequired[Callable[[TrajectoryGroup], None] | None]
    """Called with each group as soon as its trajectories are finished, while others are still generated. A generator
    need not: what a trainer does with a group early it otherwise does when it has the batch."""


class GeneratorInterface(ABC):
    """Interface of generators: prompts to trajectories. A failed rollout is returned as data and never ends the batch.

    Custom generators implement `generate`, and optionally `generate_groups`, which avoids the conversion from columns.
    The trainer calls them through `request_rollouts`.
    """

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Return one trajectory for each prompt, in the order of the prompts, as columns."""

    async def generate_groups(self, input_batch: GeneratorInput) -> RolloutBatch:
        """Return one trajectory for each prompt, in the order of the prompts, in groups of one prompt each.

        Raises:
            RuntimeError, ValueError: the columns returned by `generate` are inconsistent or do not match the input.
        """
        return to_rollout_batch(await self.generate(input_batch), get_trajectory_ids(input_batch))


def request_rollouts(generator: GeneratorInterface, input_batch: GeneratorInput) -> Awaitable[RolloutBatch]:
    """Request trajectory groups from a generator by `generate` or `generate_groups`, whichever is defined by the most
    derived class, so that an override of either is always used."""
    for cls in type(generator).__mro__:
        if "generate_groups" in vars(cls):
            return generator.generate_groups(input_batch)
        if "generate" in vars(cls):
            return GeneratorInterface.generate_groups(generator, input_batch)
    raise TypeError(
        f"{type(generator).__name__} is not a generator: it defines neither `generate` nor `generate_groups`"
    )


def get_trajectory_ids(input_batch: GeneratorInput) -> list[TrajectoryID]:
    """Return the requested sample at each position of an input; without ids, each position is a separate prompt."""
    return input_batch.get("trajectory_ids") or [TrajectoryID(str(i), 0) for i in range(len(input_batch["prompts"]))]


def report_groups(
    tasks: Sequence[asyncio.Task[Trajectory]], input_batch: GeneratorInput, report: Callable[[list[Trajectory]], None]
) -> None:
    """Call `report` with the trajectories of each prompt as soon as all of its tasks have succeeded.

    Args:
        tasks: the task of each position of the input.
    """

    def watch(own: list[asyncio.Task[Trajectory]]) -> None:
        def ended(task: asyncio.Task[Trajectory]) -> None:
            running.discard(task)
            if not running and not any(each.cancelled() or each.exception() for each in own):
                report([each.result() for each in own])

        running = set(own)
        for task in own:
            task.add_done_callback(ended)

    pairs = zip(get_trajectory_ids(input_batch), tasks, strict=True)
    for _, samples in itertools.groupby(pairs, key=lambda pair: pair[0].instance_id):
        watch([task for _, task in samples])
