"""Policy losses: per-token, so that reducing them over a mini-batch is one place's business (`reduction.py`).

Shapes: B sequences, T response tokens.
"""

from collections.abc import Callable, Mapping

import torch

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config import AlgorithmConfig

PolicyLoss = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
"""Called with `log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs`, all tensors [B, T];
returns the loss of every token [B, T] and metrics by name, each a tensor [B, T] that is averaged over the tokens of
the
mini-batch."""

PolicyLossRegistry: Registry[PolicyLoss] = Registry("policy loss")
register_policy_loss = PolicyLossRegistry.decorator


def importance_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """pi / pi_old per token [B, T], in float32. The log-ratio is kept within +-20: e^20 is large enough."""
    return (log_probs.float() - old_log_probs.float()).clamp(-20, 20).exp()


@register_policy_loss("regular")
def ppo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, eq. 7):

        ratio = pi / pi_old
        loss  = -min(ratio * A, clip(ratio, 1 - eps_clip_low, 1 + eps_clip_high) * A)

    Args:
        log_probs, old_log_probs, advantages: [B, T]
        loss_mask, rollout_logprobs: not used by this loss.

    Returns:
        loss of every token [B, T]; metrics `clip_ratio` (1 where the clipped branch decides) and `ratio`.
    """
    ratio = importance_ratio(log_probs, old_log_probs)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    metrics = {"clip_ratio": (clipped > plain).float(), "ratio": ratio.detach()}
    return torch.maximum(plain, clipped), metrics
