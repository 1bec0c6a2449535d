"""AdamW (https://arxiv.org/abs/1711.05101) on one model's adapter, which lies in memory as one vector.

Shapes: P numbers of the adapter.
"""

import torch

from tx.tinker.types import AdamParams

_TINY = torch.finfo(torch.float32).tiny
"""In place of an eps of 0: B is zero at first, so A has no gradient, and 0 / 0 is no number."""


def adamw_(
    weights: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    step: int,
    params: AdamParams,
) -> None:
    """One step, in place:

        m = b1 m + (1 - b1) g             v = b2 v + (1 - b2) g^2
        p = p - lr wd p                   (the decay does not pass through m and v)
        p = p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        weights, gradient, mean, square: [P] float32: p, g, m, v.
        step: t, from 1.
    """
    mean.mul_(params.beta1).add_(gradient, alpha=1 - params.beta1)
    square.mul_(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    root = (square / (1 - params.beta2**step)).sqrt_().add_(params.eps or _TINY)
    if params.weight_decay:
        weights.mul_(1 - params.learning_rate * params.weight_decay)
    weights.addcdiv_(mean, root, value=-params.learning_rate / (1 - params.beta1**step))


def clip_(gradient: torch.Tensor, largest_norm: float) -> float:
    """g = g min(1, largest_norm / |g|), in place; 0 leaves it as it is. Returns |g| of before.

    The norm is summed in float64, so it is finite where every number is.
    """
    norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
    if 0 < largest_norm < norm < float("inf"):
        gradient.mul_(largest_norm / norm)
    return norm
