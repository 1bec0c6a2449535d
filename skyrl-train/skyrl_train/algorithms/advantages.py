"""Advantage estimators: from rewards to how much better each token was than expected.

An estimator sees only rollouts that ended as they should: a failed one is taken out before, so that no estimator has to
know of failures and none can let one into a baseline.

Shapes: B sequences, T response tokens, G groups (the samples of one prompt).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from skyrl_train.algorithms.registry import Registry

AdvantageEstimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Called with keywords `token_level_rewards` [B, T], `response_mask` [B, T], `index` (B group names), `config`
(AlgorithmConfig), `grpo_norm_by_std`, `gamma`, `lambd`, `values`; returns advantages and returns, both [B, T]."""

AdvantageEstimatorRegistry: Registry[AdvantageEstimator] = Registry("advantage estimator")
register_advantage_estimator = AdvantageEstimatorRegistry.decorator

_EPSILON = 1e-6


def group_numbers(index: Sequence[Hashable]) -> torch.Tensor:
    """Group names as numbers 0..G-1 [B], in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in index], dtype=torch.int64)


def group_means(scores_B: torch.Tensor, group_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean score and number of samples of each group [G]."""
    size_G = torch.bincount(group_B).to(scores_B.dtype)
    return torch.zeros_like(size_G).scatter_add_(0, group_B, scores_B) / size_G, size_G


@register_advantage_estimator("grpo")
def grpo_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Sequence[Hashable],
    grpo_norm_by_std: bool = True,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (GRPO, https://arxiv.org/abs/2402.03300, section 4.1):

        score_b = sum_t reward_bt
        A_bt    = (score_b - mean of the group) / (std of the group + 1e-6)

    with the sample standard deviation (divisor n - 1). A group of one has no baseline: mean 0, std 1.
    Without `grpo_norm_by_std` there is no division (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B = token_level_rewards.sum(dim=-1)
    group_B = group_numbers(index).to(scores_B.device)
    mean_G, size_G = group_means(scores_B, group_B)
    alone_B = size_G[group_B] == 1
    centred_B = scores_B - torch.where(alone_B, 0.0, mean_G[group_B])
    if grpo_norm_by_std:
        variance_G = torch.zeros_like(size_G).scatter_add_(0, group_B, centred_B.square()) / (size_G - 1).clamp(min=1)
        std_B = torch.where(alone_B, 1.0, variance_G.sqrt()[group_B])
        centred_B = centred_B / (std_B + _EPSILON)
    return _of_every_token(centred_B, response_mask)


@register_advantage_estimator("rloo")
def rloo_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Hashable], **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with the mean of the *other* samples of the prompt as baseline (RLOO, https://arxiv.org/abs/2402.14740,
    section 2.2):

        A_b = score_b - (sum of the group's scores - score_b) / (n - 1)  =  n / (n - 1) * (score_b - mean of the group)

    The baseline of a sample does not depend on the sample, so the gradient is unbiased. A group of one has no others:
    its advantage is 0, and it teaches nothing.

    Returns:
        advantages and returns (equal here), [B, T], 0 outside `response_mask`.
    """
    scores_B = token_level_rewards.sum(dim=-1)
    group_B = group_numbers(index).to(scores_B.device)
    mean_G, size_G = group_means(scores_B, group_B)
    scale_G = size_G / (size_G - 1).clamp(min=1)
    return _of_every_token((scores_B - mean_G[group_B]) * scale_G[group_B], response_mask)


def _of_every_token(values_B: torch.Tensor, response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sequence's value at each of its tokens [B, T], as advantages and as returns."""
    advantages = torch.where(response_mask != 0, values_B[:, None], 0.0)
    return advantages, advantages


def normalize_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Advantages with mean 0 and variance 1 over the tokens where mask is 1; 0 elsewhere. [B, T]"""
    kept = torch.where(mask != 0, advantages, 0.0)
    count = mask.sum().clamp(min=2)
    mean = kept.sum() / count
    variance = torch.where(mask != 0, (advantages - mean).square(), 0.0).sum() / (count - 1)
    return torch.where(mask != 0, (advantages - mean) * torch.rsqrt(variance + 1e-8), 0.0)
