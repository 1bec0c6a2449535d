"""Losses relative to the rollout policy: the engine's, of older weights or lower precision.

Shapes: B sequences, T response tokens. Every loss returns its value at each token [B, T] (0 outside `loss_mask`, for
any input) and metrics [B, T].
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from skyrl_train.algorithms.losses.contract import (
    LossRequirements,
    get_required_rollout_logprobs,
    importance_ratio,
    register_policy_loss,
)
from skyrl_train.algorithms.losses.surrogates import compute_clipped_surrogate
from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig, BaseConfig
from skyrl_train.config.bounds import Above, AtLeast

_ROLLOUT_LOG_PROBS = LossRequirements(rollout_log_probs=True)


@register_policy_loss("rollout_is", requires=_ROLLOUT_LOG_PROBS)
def rollout_is_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute REINFORCE with a detached importance weight against the rollout policy, and without tokens far from it:

        ratio = stop_gradient(pi / pi_rollout)
        loss  = -ratio * A * log pi    where 1 - eps_clip_low < ratio < 1 + eps_clip_high, else 0

    Dropped tokens still count in the mean. `old_log_probs` are not used.

    Returns:
        loss of every token [B, T]; metrics `clip_ratio` (1 at dropped tokens) and `ratio`.
    """
    rollout_logprobs = get_required_rollout_logprobs(rollout_logprobs, "rollout_is")
    log_probs, advantages, rollout_logprobs = apply_mask(loss_mask, log_probs, advantages, rollout_logprobs)
    ratio = importance_ratio(log_probs, rollout_logprobs).detach()
    inside = (ratio > 1 - config.eps_clip_low) & (ratio < 1 + config.eps_clip_high)
    # Dropped by loss 0 and not by weight: the weights are fixed before the mini-batch is split.
    loss = torch.where(inside, -ratio * advantages * log_probs, 0.0)
    return loss, {"clip_ratio": (~inside).float(), "ratio": ratio}


@dataclass(kw_only=True)
class DPPOConfig(BaseConfig):
    """Trust region of the `dppo` loss, measured between the policy and the rollout policy."""

    divergence: Literal["binary_tv", "binary_kl"] = "binary_tv"
    """Divergence of the two distributions over {this token, any other}: total variation, or KL divergence."""

    mask: Literal["one_sided", "two_sided"] = "one_sided"
    """`one_sided`: a token is masked if its advantage would push it further out of the region. `two_sided`: a token
    outside the region is masked for any advantage."""

    delta_low: Annotated[float, AtLeast(0)] = 0.2
    """Largest divergence at which a token whose probability has decreased is trained, if its advantage is negative
    (`two_sided`: for any advantage)."""

    delta_high: Annotated[float, AtLeast(0)] = 0.2
    """Largest divergence at which a token whose probability has increased is trained, if its advantage is positive
    (`two_sided`: for any advantage)."""


@register_policy_loss("dppo", settings=DPPOConfig, requires=_ROLLOUT_LOG_PROBS)
def dppo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute a policy gradient with a trust region by divergence instead of a ratio clip (DPPO,
    https://arxiv.org/abs/2602.04879). With p the token's current probability and mu its probability at generation:

        loss = -p / mu * A    but 0 where the token moved too far in the direction of its advantage:
                              A > 0, p > mu and D > delta_high,  or  A < 0, p < mu and D > delta_low
                              (mask=two_sided: in either direction, for any A)

        D = |p - mu|                                                        divergence=binary_tv
        D = mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p))               divergence=binary_kl

    so rare tokens may move by large ratios, and likely ones not by large amounts. `old_log_probs` are not used.

    Returns:
        loss of every token [B, T]; metrics `clip_ratio` (1 at masked tokens) and `ratio` (p / mu).
    """
    rollout_logprobs = get_required_rollout_logprobs(rollout_logprobs, "dppo")
    log_probs, advantages, rollout_logprobs = apply_mask(loss_mask, log_probs, advantages, rollout_logprobs)
    ratio = importance_ratio(log_probs, rollout_logprobs)
    own = config.section(DPPOConfig)
    # The bound of the region is a decision: no gradient flows through the comparison.
    with torch.no_grad():
        divergence = _compute_binary_divergence(log_probs, rollout_logprobs, own.divergence)
        risen = (log_probs > rollout_logprobs) & (divergence > own.delta_high)
        fallen = (log_probs < rollout_logprobs) & (divergence > own.delta_low)
        if own.mask == "one_sided":
            risen, fallen = risen & (advantages > 0), fallen & (advantages < 0)
        stopped = risen | fallen
    loss = torch.where(stopped, 0.0, -ratio * advantages)
    return loss, {"clip_ratio": stopped.float(), "ratio": ratio.detach()}


def _compute_binary_divergence(log_probs: torch.Tensor, rollout_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """Compute the divergence [B, T] of the two distributions over {the token, any other}; KL is KL(rollout ||
    policy).
    """
    # A log-prob may be rounded to +1e-8. `expm1`: the probability of "any other" is exact where the token is nearly
    # certain.
    log_p, log_mu = log_probs.clamp(max=0), rollout_logprobs.clamp(max=0)
    if kind == "binary_tv":
        return (log_p.exp() - log_mu.exp()).abs()
    other_p, other_mu = -torch.expm1(log_p), -torch.expm1(log_mu)
    # xlogy(0, 0) = 0: a token that was certain has no "any other" to compare.
    others = torch.special.xlogy(other_mu, other_mu) - torch.special.xlogy(other_mu, other_p)
    return log_mu.exp() * (log_mu - log_p) + others


@dataclass(kw_only=True)
class DecoupledPPOConfig(BaseConfig):
    """The `decoupled_ppo` loss: clipping around the policy at the start of the step, importance weight relative to the
    rollout policy.
    """

    behavior_weight_cap: Annotated[float | None, Above(0)] = None
    """Largest importance weight pi_start / pi_rollout at which a token is trained. null: no cap."""


@register_policy_loss("decoupled_ppo", settings=DecoupledPPOConfig, requires=_ROLLOUT_LOG_PROBS)
def decoupled_ppo_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute PPO clipped around the policy at the start of the step, with importance weights relative to the rollout
    policy (https://arxiv.org/abs/2505.24298, section 5.2, after https://arxiv.org/abs/2110.00641):

        weight = stop_gradient(pi_old / pi_rollout)
        loss   = weight * PPO's loss of pi / pi_old     where weight <= behavior_weight_cap, else 0

    Tokens beyond the cap still count in the mean.

    Returns:
        loss of every token [B, T]; metrics `clip_ratio` (1 where the clipped branch is the maximum), `ratio` (pi /
        pi_old),
            `behavior_weight` and `behavior_capped` (1 where the token is beyond the cap).
    """
    rollout_logprobs = get_required_rollout_logprobs(rollout_logprobs, "decoupled_ppo")
    log_probs, old_log_probs, advantages, rollout_logprobs = apply_mask(
        loss_mask, log_probs, old_log_probs, advantages, rollout_logprobs
    )
    weight = importance_ratio(old_log_probs, rollout_logprobs).detach()
    cap = config.section(DecoupledPPOConfig).behavior_weight_cap
    # Dropped above the cap, not truncated to it: such a large weight indicates a token of another policy.
    capped = torch.zeros_like(weight, dtype=torch.bool) if cap is None else weight > cap
    loss, metrics = compute_clipped_surrogate(importance_ratio(log_probs, old_log_probs), advantages, config)
    metrics |= {"behavior_weight": weight, "behavior_capped": capped.float()}
    return torch.where(capped, 0.0, weight * loss), metrics
