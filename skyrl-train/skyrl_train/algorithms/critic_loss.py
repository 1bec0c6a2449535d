"""Loss of the critic.

Shapes: B sequences, T response tokens.
"""

import torch

from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig


def critic_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the squared error of the values, clipped as PPO clips its ratio (https://arxiv.org/abs/2005.12729,
    section 3):

        near = clip(V, V_old - value_clip, V_old + value_clip)
        loss = max((V - R)^2, (near - R)^2) / 2

    A value that has moved by more than `value_clip` towards its return has no gradient.

    Args:
        values, old_values, returns: [B, T]; old values are from the start of the step.
        loss_mask: [B, T]; where it is 0 the loss is 0, for any values. None: all tokens count.

    Returns:
        loss of every token [B, T]; metric `values_clipfrac` (1 where the clipped branch is the maximum).
    """
    values, old_values, returns = apply_mask(loss_mask, values, old_values, returns)
    # The bounds are per token. clamp has no gradient outside of them, as intended.
    near = values.clamp(old_values - config.value_clip, old_values + config.value_clip)
    plain, clipped = (values - returns).square(), (near - returns).square()
    return torch.maximum(plain, clipped) / 2, {"values_clipfrac": (clipped > plain).float()}
