"""What a generator is: prompts in, trajectories out, in the same order. Knows no engine and no environment."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

from skyrl_train.errors import FailureKind
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
class TrajectoryID:
    """Which sample of which prompt."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass(frozen=True)
class BatchMetadata:
    """When a batch was asked for. `global_step` seeds its sampling, so that a resumed run samples the same."""

    global_step: int | None
    training_phase: TrainingPhase


@dataclass(frozen=True)
class Failure:
    """Why a trajectory failed, for masking, metrics and the reader of the trajectories file."""

    kind: FailureKind
    message: str


class GeneratorInput(TypedDict):
    """B conversations; a prompt sampled n times stands n times in a row."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: NotRequired[list[dict[str, Any]] | None]
    sampling_params: NotRequired[dict[str, Any] | None]
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    batch_metadata: NotRequired[BatchMetadata | None]


class GeneratorOutput(TypedDict):
    """B trajectories, in the order of the input. With `is_last_step`: B turns of them, in the same order and in that of
    the turns.

    `response_ids` is everything after the prompt (what the model and the environment wrote); `loss_masks` is 1 on the
    tokens the model wrote. Rewards are one float a trajectory, or one a response token.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, float] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: NotRequired[list[TrajectoryID] | None]
    is_last_step: NotRequired[list[bool] | None]
    """Step-wise: every turn is a row of its own, and this is True on the last of its trajectory. Rows of a trajectory
    have the same `trajectory_ids`, stop reason and failure."""
    weight_versions: NotRequired[list[list[int]] | None]
    """Version of the weights that wrote each response token; -1 on tokens the model did not write."""
    failures: NotRequired[list[Failure | None] | None]
    """None for a trajectory that ended as it should. A failed one has loss mask 0 and enters no baseline."""


class MetricsOutput(TypedDict):
    """Scores of a batch; None where every trajectory failed."""

    avg_score: float | None
    pass_at_n: float | None
    mean_positive_reward: float | None


class GeneratorInterface(ABC):
    """Turns prompts into trajectories. A failed rollout is data: it never ends the batch."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput: ...
