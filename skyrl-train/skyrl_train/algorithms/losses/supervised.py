"""Losses for given responses (demonstrations).

Shapes: B sequences, T response tokens.
"""

import torch

from skyrl_train.algorithms.losses.contract import LossRequirements, register_policy_loss
from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig


@register_policy_loss("cross_entropy", requires=LossRequirements(advantages=False))
def cross_entropy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor | None,
    advantages: torch.Tensor | None,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the negative log-likelihood of each token: loss = -log pi [B, T], 0 outside `loss_mask`. Reads nothing
    else.
    """
    (log_probs,) = apply_mask(loss_mask, log_probs)
    return -log_probs, {}
