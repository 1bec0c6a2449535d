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
    return _clipped_surrogate(importance_ratio(log_probs, old_log_probs), advantages, config)


def _clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-min(ratio * A, clip(ratio) * A) of every token, whatever the ratio is one of."""
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    metrics = {"clip_ratio": (clipped > plain).float(), "ratio": ratio.detach()}
    return torch.maximum(plain, clipped), metrics


@register_policy_loss("dual_clip")
def dual_clip_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """PPO with a second clip, which bounds the loss of a bad token that became much likelier
    (https://arxiv.org/abs/1912.09729, eq. 5):

        loss = PPO's loss                                   where A >= 0
        loss = min(PPO's loss, -clip_ratio_c * A)           where A < 0

    Shapes and metrics as of `regular`.
    """
    loss, metrics = ppo_policy_loss(log_probs, old_log_probs, advantages, config)
    bounded = torch.minimum(loss, -config.clip_ratio_c * advantages)
    return torch.where(advantages < 0, bounded, loss), metrics


@register_policy_loss("gspo")
def gspo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate with one ratio a sequence, the geometric mean of its tokens' (GSPO-token,
    https://arxiv.org/abs/2507.18071, eq. 13 and 14):

        s_b     = exp(mean over the tokens of b of log(pi / pi_old))
        ratio_t = stop_gradient(s_b) * pi_t / stop_gradient(pi_t)

    so the value is the sequence's and each token has its own gradient. Meant for `loss_reduction=sequence_mean`.

    Args:
        loss_mask: [B, T]; the tokens of a sequence are those where it is not 0 (all of them if it is None).
    """
    log_ratio = (log_probs.float() - old_log_probs.float()).clamp(-20, 20)
    mask = torch.ones_like(log_ratio) if loss_mask is None else (loss_mask != 0).float()
    mean_B1 = torch.where(mask != 0, log_ratio, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = (mean_B1.detach() + log_probs.float() - log_probs.float().detach()).exp()
    return _clipped_surrogate(ratio, advantages, config)


@register_policy_loss("cispo")
def cispo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE with a clipped, detached importance weight (CISPO, https://arxiv.org/abs/2506.13585, eq. 4 and 5):

        weight = stop_gradient(clip(ratio, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high))
        loss   = -weight * A * log pi

    No token loses its gradient to the clip, unlike PPO's. Metrics: `clip_ratio` is 1 where the weight was clipped.
    """
    ratio = importance_ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high)
    metrics = {"clip_ratio": (weight != ratio).float(), "ratio": ratio}
    return -weight * advantages * log_probs.float(), metrics


@register_policy_loss("sapo")
def sapo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A soft gate in place of the clip (SAPO, https://arxiv.org/abs/2511.20347):

        gate = 4 / tau * sigmoid(tau * (ratio - 1))         tau = tau_pos where A > 0, else tau_neg
        loss = -gate * A

    Its slope at ratio 1 is 1, as of the plain surrogate, and falls off smoothly on both sides. Metric: `ratio`.
    """
    ratio = importance_ratio(log_probs, old_log_probs)
    tau = torch.where(advantages > 0, config.sapo.tau_pos, config.sapo.tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return -gate * advantages, {"ratio": ratio.detach()}
