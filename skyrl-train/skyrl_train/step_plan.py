"""The arithmetic of a run before it starts (published early: the signature stays, the body comes)."""

from dataclasses import dataclass

from skyrl_train.config import SkyRLConfig


@dataclass(frozen=True)
class ModelShape:
    """What the estimates need to know of a model."""

    num_parameters: int
    num_trainable: int | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class StepPlan:
    def lines(self) -> list[str]:
        return []

    def __str__(self) -> str:
        return "\n".join(self.lines())


def model_shape(path: str, *, overrides: dict[str, object] | None = None) -> ModelShape:
    """Parameter counts from the model's config, on the meta device: loads no weights."""
    raise NotImplementedError


def step_plan(
    cfg: SkyRLConfig,
    num_parameters: int | None = None,
    *,
    policy: ModelShape | None = None,
    critic: ModelShape | None = None,
    num_prompts: int | None = None,
) -> StepPlan:
    """The plan of a run. `num_prompts`: of the dataset. `policy`, `critic`: from `model_shape`, for the estimates."""
    return StepPlan()
