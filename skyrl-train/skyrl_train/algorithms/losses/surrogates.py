"""Policy gradients weighted by the ratio pi / pi_old, which differ in how they bound the effect of a token.

Shapes: B sequences, T response tokens. Every loss returns its value at each token [B, T] (0 outside `loss_mask`, for
any input) and metrics [B, T].
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from skyrl_train.algorithms.losses.contract import (
    LOG_RATIO_BOUND,
    LossRequirements,
    get_required_rollout_logprobs,
    importance_ratio,
    register_policy_loss,
)
from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig, BaseConfig
from skyrl_train.config.bounds import Above, AtLeast


@register_policy_loss("regular")
def ppo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute PPO's clipped surrogate (https://arxiv.org/abs/1707.06347, eq. 7):

        ratio = pi / pi_old
        loss  = -min(ratio * A, clip(ratio, 1 - eps_clip_low, 1 + eps_clip_high) * A)

    Args:
        log_probs, old_log_probs, advantages: [B, T]
        loss_mask: [B, T], 1 on the tokens that train; None: on all.
        rollout_logprobs: not used by this loss.

    Returns:
        loss of every token [B, T]; metrics `clip_ratio` (1 where the clipped branch decides) and `ratio`.
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    return compute_clipped_surrogate(importance_ratio(log_probs, old_log_probs), advantages, config)


def compute_clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute -min(ratio * A, clip(ratio) * A) of every token, for any kind of ratio."""
    # Written as a loss, so min over objectives becomes max over losses.
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high) * advantages
    # Strictly greater: on the boundary, as on the first step with ratio 1, both are equal and nothing is clipped.
    metrics = {"clip_ratio": (clipped > plain).float(), "ratio": ratio.detach()}
    return torch.maximum(plain, clipped), metrics


@register_policy_loss("dual_clip", requires=LossRequirements(above=(("clip_ratio_c", 1.0),)))
def dual_clip_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute PPO with a second clip that bounds the loss of tokens with negative advantage and large ratio
    (https://arxiv.org/abs/1912.09729, eq. 5):

        loss = PPO's loss                                   where A >= 0
        loss = min(PPO's loss, -clip_ratio_c * A)           where A < 0

    Shapes and metrics as in `regular`.
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    loss, metrics = compute_clipped_surrogate(importance_ratio(log_probs, old_log_probs), advantages, config)
    # -c * A is constant in the policy: where it applies, the token has no gradient.
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
    """Compute PPO's clipped surrogate with one ratio per sequence, the geometric mean of its token ratios (GSPO-token,
    https://arxiv.org/abs/2507.18071, eq. 13 and 14):

        s_b     = exp(mean over the tokens of b of log(pi / pi_old))
        ratio_t = stop_gradient(s_b) * pi_t / stop_gradient(pi_t)

    so the value is per sequence and each token has a separate gradient. Intended for `loss_reduction=sequence_mean`.

    Args:
        loss_mask: [B, T]; nonzero at the tokens of a sequence (None: all tokens).
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    log_ratio = (log_probs - old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # For any weights in the mask, a token counts once towards the length of its sequence.
    tokens = torch.ones_like(log_ratio) if loss_mask is None else (loss_mask != 0).to(log_ratio.dtype)
    # `apply_mask` has set masked positions to 0 in both log-probs, so the plain sum is over the unmasked tokens.
    mean_B1 = log_ratio.sum(-1, keepdim=True) / tokens.sum(-1, keepdim=True).clamp(min=1)
    # The last two terms cancel in value but not in gradient: d ratio / d log_prob_t = s_b for every token t.
    ratio = (mean_B1.detach() + log_probs - log_probs.detach()).exp()
    return compute_clipped_surrogate(ratio, advantages, config)


@dataclass(kw_only=True)
class CISPOConfig(BaseConfig):
    """Importance weight of the `cispo` loss: its denominator and its bounds."""

    cispo_anchor: Literal["old", "rollout"] = "old"
    """Denominator of the importance weight. `old`: the policy at the start of the step. `rollout`: the rollout policy
    (the engine's log-probs), which needs no further correction for stale or less precise rollouts."""

    cispo_eps_clip_low: Annotated[float, AtLeast(0)] = 1.0
    """Lower bound of the importance weight is 1 - this. 1: no lower bound, as in the paper."""

    cispo_eps_clip_high: Annotated[float, Above(0)] = 4.0
    """Upper bound of the importance weight is 1 + this."""


@register_policy_loss(
    "cispo",
    settings=CISPOConfig,
    requires=LossRequirements(rollout_log_probs_with=("cispo.cispo_anchor", "rollout")),
)
def cispo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute REINFORCE with a clipped, detached importance weight (CISPO, https://arxiv.org/abs/2506.13585, eq. 4 and
    5):

        ratio  = pi / pi_old                    cispo_anchor=old
        ratio  = pi / pi_rollout                cispo_anchor=rollout; `old_log_probs` are not used
        weight = stop_gradient(clip(ratio, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high))
        loss   = -weight * A * log pi

    Unlike in PPO, clipped tokens keep their gradient. Metrics: `clip_ratio` is 1 where the weight was clipped.
    """
    own = config.section(CISPOConfig)
    if own.cispo_anchor == "rollout":
        old_log_probs = get_required_rollout_logprobs(rollout_logprobs, "cispo with cispo_anchor=rollout")
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    # Detached before the clip: the gradient flows through log_probs alone, as in REINFORCE.
    ratio = importance_ratio(log_probs, old_log_probs).detach()
    weight = ratio.clamp(1 - own.cispo_eps_clip_low, 1 + own.cispo_eps_clip_high)
    return -weight * advantages * log_probs, {"clip_ratio": (weight != ratio).float(), "ratio": ratio}


@dataclass(kw_only=True)
class SAPOConfig(BaseConfig):
    """Temperatures of the soft gate of the `sapo` loss."""

    tau_pos: Annotated[float, Above(0)] = 1.0
    """Temperature of tokens with a positive advantage."""

    tau_neg: Annotated[float, Above(0)] = 1.05
    """Temperature of all other tokens. If larger than `tau_pos`, the gate closes faster for tokens whose probability is
    reduced."""


@register_policy_loss("sapo", settings=SAPOConfig)
def sapo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute a policy gradient with a soft gate instead of a clip (SAPO, https://arxiv.org/abs/2511.20347):

        gate = 4 / tau * sigmoid(tau * (ratio - 1))         tau = tau_pos where A > 0, else tau_neg
        loss = -gate * A

    The gate's slope is 1 at ratio 1, as for the plain surrogate, and decreases smoothly on both sides. Metric: `ratio`.
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    ratio = importance_ratio(log_probs, old_log_probs)
    own = config.section(SAPOConfig)
    tau = torch.full_like(advantages, own.tau_neg).masked_fill(advantages > 0, own.tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return -gate * advantages, {"ratio": ratio.detach()}


@register_policy_loss("importance_sampling")
def importance_sampling_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the unbounded surrogate (conservative policy iteration, https://arxiv.org/abs/1707.06347, eq. 6):

        loss = -pi / pi_old * A

    It does not constrain the distance to the old policy. Metric: `ratio`.
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    ratio = importance_ratio(log_probs, old_log_probs)
    return -ratio * advantages, {"ratio": ratio.detach()}
