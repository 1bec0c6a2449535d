"""Estimates of KL(policy || reference) from the sampled tokens, and controllers of its coefficient.

Shapes: B sequences, T response tokens. Estimators: http://joschu.net/blog/kl-approx.html
"""

from typing import Literal

import torch

from skyrl_train.algorithms.masking import apply_mask

KLEstimator = Literal["k1", "k2", "k3", "k3+", "abs"]


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    loss_mask: torch.Tensor | None = None,
    kl_estimator_type: KLEstimator = "k3",
) -> torch.Tensor:
    """Per-token KL estimate [B, T], with a gradient in `log_probs`. With d = log_probs - log_probs_base:

        k1 = d          unbiased, high variance, may be negative
        abs = |d|
        k2 = d^2 / 2    biased; has the gradient of the true KL
        k3 = exp(-d) - 1 + d    unbiased, never negative
        k3+ = k3 + k2 - stop_gradient(k2), with stop_gradient(k3)    value of k3, gradient of k2 (straight-through)

    For k3 and k3+, d is kept within +-20 and the result within +-10, so that a single outlier cannot dominate the
    batch.

    Args:
        log_probs, log_probs_base: [B, T]
        loss_mask: [B, T]; where it is 0 the result is 0, for any input.
    """
    log_probs, log_probs_base = apply_mask(loss_mask, log_probs, log_probs_base)
    d = log_probs - log_probs_base
    if kl_estimator_type == "k1":
        return d
    if kl_estimator_type == "abs":
        return d.abs()
    if kl_estimator_type == "k2":
        return d.square() / 2
    if kl_estimator_type in ("k3", "k3+"):
        # exp(20) is about 5e8, finite in float32 and bfloat16. Outside of a clamp the gradient is 0, so a single
        # outlier cannot dominate the step.
        negative = (-d).clamp(-20, 20)
        k3 = (negative.exp() - negative - 1).clamp(-10, 10)
        if kl_estimator_type == "k3":
            return k3
        # The difference is exactly 0 and has the gradient d: the expected gradient of k2 equals the gradient of the KL
        # divergence.
        k2 = negative.square() / 2
        return k3.detach() + (k2 - k2.detach())
    raise ValueError(f"kl_estimator_type must be one of k1, k2, k3, k3+, abs; got {kl_estimator_type!r}")


class FixedKLController:
    """Controller with a constant coefficient."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        pass


class AdaptiveKLController:
    """Controller that adapts the coefficient to reach a target KL (https://arxiv.org/abs/1909.08593, section 2.2):

    error = clip(current / target - 1, -0.2, 0.2)
    value <- value * (1 + error * n_steps / horizon)
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: int):
        if horizon <= 0:
            raise ValueError(f"the horizon of an adaptive KL controller must be positive; got {horizon}")
        self.value = init_kl_coef
        self._target = target
        self._horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update the coefficient. `current`: the measured KL. `n_steps`: number of sequences it was measured on."""
        # Bounded, so that an outlier changes the coefficient by at most a fifth per horizon.
        error = min(max(current / self._target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self._horizon
