"""A user's file: a policy loss with settings of its own and an advantage estimator, each with its registration."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig
from skyrl_train.config.bounds import AtLeast
from skyrl_train.utils.ppo_utils import (
    EstimatorRequirements,
    LossRequirements,
    register_advantage_estimator,
    register_policy_loss,
)


@dataclass(kw_only=True)
class PullSettings:
    """The `pull` loss."""

    strength: Annotated[float, AtLeast(0)] = 0.5
    """Weight of the squared distance to the engine's log-probs."""

    power: int = 2
    """Exponent of the distance; even."""

    def __post_init__(self) -> None:
        if self.power % 2:
            raise ValueError(f"power={self.power} must be even")


@register_policy_loss("pull", settings=PullSettings, requires=LossRequirements(rollout_log_probs=True))
def pull_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE with a pull to the policy that wrote the tokens."""
    assert rollout_logprobs is not None
    own = config.section(PullSettings)
    # Masked positions may hold anything, NaN included: they become 0 before anything is computed with them.
    log_probs, advantages, rollout_logprobs = apply_mask(loss_mask, log_probs, advantages, rollout_logprobs)
    distance = (log_probs - rollout_logprobs) ** own.power
    loss = -advantages * log_probs + own.strength * distance
    return loss, {"strength": torch.full_like(log_probs, own.strength)}


@register_advantage_estimator("best_of_group", requires=EstimatorRequirements(critic=False, groups=True))
def best_of_group(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """1 on the best answers of a prompt, 0 on the others."""
    scores = torch.where(response_mask != 0, token_level_rewards, 0.0).sum(-1).tolist()
    best = {name: max(s for s, other in zip(scores, index, strict=True) if other == name) for name in index}
    rows = torch.tensor([float(score == best[name]) for score, name in zip(scores, index, strict=True)])
    advantages = torch.where(response_mask != 0, rows[:, None], 0.0)
    return advantages, advantages
