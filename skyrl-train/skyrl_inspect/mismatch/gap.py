"""The distance between two log-probs of the same tokens, as one number each.

Shapes: N tokens.
"""

from dataclasses import dataclass

import torch

from skyrl_train.algorithms.off_policy import mismatch_metrics


@dataclass(frozen=True)
class Gap:
    """Distance between an engine's own log-probs of its tokens and the trainer's."""

    num_tokens: int
    mean: float
    """Mean of |trainer - engine| [nats]; `p99` and `max` are of the same difference."""

    p99: float
    max: float
    kl: float
    """k3 estimate of KL(rollout || trainer): mean of rho - 1 - log rho, rho = exp(trainer - engine)."""

    outside_clip: float
    """Share of the tokens whose rho is outside [1 - eps_clip_low, 1 + eps_clip_high] before any training."""

    ess: float
    """Effective share of the samples under the weights rho: (sum rho)^2 / (N sum rho^2)."""


def compute_gap(train: torch.Tensor, rollout: torch.Tensor, clip_low: float, clip_high: float) -> Gap:
    """Compare the log-probs of the N tokens that an engine generated.

    Args:
        train, rollout: [N], finite; N at least 1.
        clip_low, clip_high: `trainer.algorithm.eps_clip_low` and `eps_clip_high`.
    """
    metrics = mismatch_metrics(train[None], rollout[None], torch.ones_like(train)[None])
    found = {name.removeprefix("policy/rollout_train_"): value for name, value in metrics.items()}
    difference = (train - rollout).double()
    ratio = difference.exp()
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return Gap(
        num_tokens=len(train),
        mean=found["logprobs_abs_diff_mean"],
        p99=compute_quantile(difference.abs(), 0.99),
        max=found["logprobs_abs_diff_max"],
        kl=found["kl_k3"],
        outside_clip=outside.double().mean().item(),
        ess=found["ess"],
    )


def compute_quantile(values: torch.Tensor, share: float) -> float:
    """The smallest of the values [N] that at least `share` of them do not exceed."""
    rank = max(1, -int(-share * len(values) // 1))  # rounded up
    return values.kthvalue(rank).values.item()


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean of |one - other|; both [N]."""
    return (one.double() - other.double()).abs().mean().item()
