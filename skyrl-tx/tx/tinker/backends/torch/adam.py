"""AdamW (https://arxiv.org/abs/1711.05101) on one model's adapter, which is stored as one vector.

The update is elementwise, so each rank can hold a shard of the vector; only norms depend on all elements, and are
passed as a function.

Shapes: P numbers of the adapter, or of this rank's shard.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from tx.errors import ModelError
from tx.tinker.backends.torch.rank_group import ALONE
from tx.tinker.types import AdamParams

_FLOAT32 = torch.finfo(torch.float32)


class AdamState(NamedTuple):
    """Weights and moments, [P] float32 each: p, m, v."""

    weights: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor


Norm = Callable[[torch.Tensor], float]
"""Euclidean norm of a whole vector, of which the argument may be this rank's part (`RankGroup.norm`)."""


def adamw(
    before: AdamState,
    gradient: torch.Tensor,
    step: int,
    params: AdamParams,
    scaling: float = 1.0,
    norm: Norm = ALONE.compute_norm,
) -> AdamState:
    """Compute the state after one step; `before` and `gradient` are not modified.

        m = b1 m + (1 - b1) g             v = b2 v + (1 - b2) g^2
        p = p - lr wd p                   (the decay does not pass through m and v)
        p = p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)

    Args:
        gradient: [P] float32, finite: g.
        step: t, from 1.
        scaling: of the product B A that the weights are the factors of.

    Raises:
        ModelError: float32 cannot hold the result; names the setting, or the moment.
    """
    decay = _to_float32(
        "adam_params.learning_rate * adam_params.weight_decay", params.learning_rate * params.weight_decay
    )
    rate = _to_float32(
        f"adam_params.learning_rate={params.learning_rate:g} / (1 - beta1^{step})",
        params.learning_rate / _compute_bias_correction("beta1", params.beta1, step),
    )
    # An eps of 0 is the smallest number instead: a weight without a gradient would move by 0 / 0.
    eps = max(_to_float32("adam_params.eps", params.eps), _FLOAT32.tiny)
    mean = before.mean.mul(params.beta1).add_(gradient, alpha=1 - params.beta1)
    square = before.square.mul(params.beta2).addcmul_(gradient, gradient, value=1 - params.beta2)
    root = (square / _compute_bias_correction("beta2", params.beta2, step)).sqrt_()
    if not math.isfinite(norm(root)):
        raise _build_error(
            "Adam's second moment, the mean of squared gradients, is not finite in float32 (the gradient's norm is "
            f"{norm(gradient):.3g}). Set adam_params.grad_clip_norm, or lower the weights or advantages in the data"
        )
    weights = before.weights.mul(1 - decay) if decay else before.weights.clone()
    # `root` is not needed again, so eps is added in place.
    weights.addcdiv_(mean, root.add_(eps), value=-rate)
    # No entry of scaling * B A is larger than this, so what the layers add is finite as well.
    if not scaling * norm(weights) ** 2 <= _FLOAT32.max:
        raise _build_error(
            f"the weights, or their product B A, would not be finite in float32 after it (norm {norm(weights):.3g}, "
            f"before {norm(before.weights):.3g}). Lower {_to_blame(params)}"
        )
    return AdamState(weights, mean, square)


def clip_gradient(
    gradient: torch.Tensor, largest_norm: float, norm: Norm = ALONE.compute_norm
) -> tuple[torch.Tensor, float]:
    """Return g min(1, largest_norm / |g|) and |g|; a largest norm of 0 disables clipping. `gradient` is not
    modified.
    """
    length = norm(gradient)
    if 0 < largest_norm < length < math.inf:
        return gradient * (largest_norm / length), length
    return gradient, length


def _compute_bias_correction(name: str, beta: float, step: int) -> float:
    """Return 1 - beta^step, what a moment that began at 0 lacks to an average."""
    if not 0 <= beta < 1:
        raise _build_error(f"adam_params.{name} must be from 0 to below 1; got {beta}")
    return 1 - beta**step


def _to_float32(name: str, value: float) -> float:
    if not abs(value) <= _FLOAT32.max:
        raise _build_error(f"{name} is {value:.3g}, which is not finite in float32. Lower it")
    return value


def _to_blame(params: AdamParams) -> str:
    rate, decay = params.learning_rate, params.weight_decay
    if rate * decay > 2:  # it multiplies weights by more than -1
        return (
            f"adam_params.weight_decay={decay:g}: its product with adam_params.learning_rate={rate:g} must be at most 1"
        )
    return f"adam_params.learning_rate={rate:g}"


def _build_error(reason: str) -> ModelError:
    return ModelError(f"no step was taken and nothing changed: {reason}")
