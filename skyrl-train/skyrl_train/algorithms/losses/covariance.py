"""Losses that restrain the few tokens which drive entropy down, because their log-prob and advantage covary.

The covariance of a token (https://arxiv.org/abs/2505.22617, section 4) is relative to all tokens of the mini-batch:

    cov_bt = (log pi_bt - mean log pi) * (A_bt - mean A)

so tokens are selected over the whole mini-batch (by the selectors here) and passed to the losses.

Shapes: B sequences, T response tokens, N tokens of the loss mask.
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from skyrl_train.algorithms.losses.contract import importance_ratio, register_policy_loss, register_token_selector
from skyrl_train.algorithms.losses.surrogates import compute_clipped_surrogate
from skyrl_train.algorithms.masking import apply_mask
from skyrl_train.config import AlgorithmConfig, BaseConfig
from skyrl_train.config.bounds import AtLeast, Between, NotAbove


@dataclass(kw_only=True)
class ClipCovConfig(BaseConfig):
    """The `clip_cov` loss: a few tokens of high covariance between log-prob and advantage have no gradient."""

    clip_ratio: Annotated[float, Between(0, 1)] = 0.0002
    """Fraction of a mini-batch's tokens that are clipped; at least one."""

    clip_cov_lb: Annotated[float, NotAbove("clip_cov_ub")] = 1.0
    """Lower bound of the covariance of tokens that may be clipped."""

    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of tokens that may be clipped."""


@dataclass(kw_only=True)
class KLCovConfig(BaseConfig):
    """The `kl_cov` loss: a KL penalty on the tokens of highest covariance between log-prob and advantage."""

    kl_cov_frac: Annotated[float, Between(0, 1)] = 0.2
    """Fraction of a mini-batch's tokens that are penalized; at least one."""

    ppo_kl_coef: Annotated[float, AtLeast(0)] = 1.0
    """Weight of the penalty |log_prob - old_log_prob|."""


def compute_token_covariance(
    log_probs: torch.Tensor, advantages: torch.Tensor, loss_mask: torch.Tensor
) -> torch.Tensor:
    """Compute cov [B, T] as above, in float64 (a mini-batch has millions of tokens); 0 outside the mask."""
    log_probs, advantages = apply_mask(loss_mask, log_probs.double(), advantages.double())
    # Means over tokens: the padding was set to 0 and must not count in the denominator either.
    num_tokens = (loss_mask != 0).sum().clamp(min=1)
    deviations = apply_mask(
        loss_mask, log_probs - log_probs.sum() / num_tokens, advantages - advantages.sum() / num_tokens
    )
    return deviations[0] * deviations[1]


@register_token_selector("clip_cov")
@torch.no_grad()
def clip_cov_tokens(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    noise: torch.Tensor,
    config: AlgorithmConfig,
) -> torch.Tensor:
    """Select max(1, int(clip_ratio * N)) tokens [B, T] at random among candidates: clip_cov_lb < cov < clip_cov_ub, and
    not already clipped by PPO. Selects all candidates if there are fewer."""
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    _, metrics = compute_clipped_surrogate(importance_ratio(log_probs, old_log_probs), advantages, config)
    cov = compute_token_covariance(log_probs, advantages, loss_mask)
    own = config.section(ClipCovConfig)
    candidates = (cov > own.clip_cov_lb) & (cov < own.clip_cov_ub)
    # A token without a gradient would use up one of the few selected tokens.
    candidates &= (metrics["clip_ratio"] == 0) & (loss_mask != 0)
    # Noise is below 1, drawn on the driver, and stays with the rows: the choice is the same on any number of ranks. 2
    # sorts all other tokens last.
    order = torch.where(candidates, noise, 2.0).flatten().argsort()
    return _select_first(order, candidates, own.clip_ratio, loss_mask)


@register_token_selector("kl_cov")
@torch.no_grad()
def kl_cov_tokens(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    noise: torch.Tensor,
    config: AlgorithmConfig,
) -> torch.Tensor:
    """Select the max(1, int(kl_cov_frac * N)) tokens [B, T] of highest covariance; noise breaks ties."""
    candidates = loss_mask != 0
    cov = torch.where(candidates, compute_token_covariance(log_probs, advantages, loss_mask), float("-inf")).flatten()
    by_noise = torch.where(candidates, noise, 2.0).flatten().argsort()
    # Sorted by the second key first, then stably by the first.
    order = by_noise[cov[by_noise].argsort(descending=True, stable=True)]
    return _select_first(order, candidates, config.section(KLCovConfig).kl_cov_frac, loss_mask)


def _select_first(order: torch.Tensor, candidates: torch.Tensor, share: float, loss_mask: torch.Tensor) -> torch.Tensor:
    """Select the given fraction of all tokens, at least one, from the candidates [B, T] in the sequence of `order` [B *
    T]."""
    wanted = max(1, int(share * int((loss_mask != 0).sum())))
    selected = torch.zeros_like(candidates).flatten()
    selected[order[:wanted]] = True
    return selected.view_as(candidates) & candidates


@register_policy_loss("clip_cov", settings=ClipCovConfig)
def clip_cov_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    *,
    selected_tokens: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute PPO's clipped surrogate without the selected tokens (Clip-Cov, https://arxiv.org/abs/2505.22617, section
    4):

        loss = 0 at tokens selected by `clip_cov_tokens`, PPO's loss elsewhere

    Selected tokens still count in the mean. Metrics: `clip_ratio` (1 where clip or selection removed the gradient),
    `selected_ratio` (1 at selected tokens) and `ratio`.
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    loss, metrics = compute_clipped_surrogate(importance_ratio(log_probs, old_log_probs), advantages, config)
    selected = selected_tokens.float()
    # Clip and selection are disjoint among candidates; the maximum also handles custom selectors.
    metrics |= {"clip_ratio": torch.maximum(metrics["clip_ratio"], selected), "selected_ratio": selected}
    # A constant has no gradient; the token's weight stays in the mean, so the other tokens are not scaled up.
    return torch.where(selected_tokens, 0.0, loss), metrics


@register_policy_loss("kl_cov", settings=KLCovConfig)
def kl_cov_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    config: AlgorithmConfig,
    loss_mask: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    *,
    selected_tokens: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute the unclipped surrogate with a penalty at selected tokens (KL-Cov, https://arxiv.org/abs/2505.22617,
    section 4):

        loss = -ratio * A + ppo_kl_coef * |log pi - log pi_old|        at tokens selected by `kl_cov_tokens`
        loss = -ratio * A                                              elsewhere

    The penalty has no gradient at ratio 1. Metrics: `ratio` and `selected_ratio` (1 at selected tokens).
    """
    log_probs, old_log_probs, advantages = apply_mask(loss_mask, log_probs, old_log_probs, advantages)
    ratio = importance_ratio(log_probs, old_log_probs)
    penalty = config.section(KLCovConfig).ppo_kl_coef * (log_probs - old_log_probs).abs()
    loss = -ratio * advantages + torch.where(selected_tokens, penalty, 0.0)
    return loss, {"ratio": ratio.detach(), "selected_ratio": selected_tokens.float()}
