"""Masking and precision rules that all formulas of this package follow."""

import torch


def to_at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half precision and integers to float32; float32 and float64 are unchanged."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def apply_mask(mask: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with 0 where `mask` is 0 (None: nowhere), in float32 or float64.

    Call it before any arithmetic: masked positions may hold NaN or infinity, and NaN * 0 is NaN, in the gradient too.
    """
    numbers = tuple(to_at_least_float32(tensor) for tensor in tensors)
    return numbers if mask is None else tuple(torch.where(mask != 0, tensor, 0.0) for tensor in numbers)
