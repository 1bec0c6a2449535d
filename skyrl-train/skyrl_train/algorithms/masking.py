"""Masking and precision: two rules that every formula of this package keeps."""

import torch


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision and integers become float32; float32 and float64 stay what they are."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def apply_mask(mask: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with 0 wherever `mask` is 0 (None: nowhere), in float32 or float64.

    Meant to come before any arithmetic: what stands in masked positions may be NaN or infinite, and NaN * 0 is NaN
    again, in the gradient too.
    """
    numbers = tuple(at_least_float32(tensor) for tensor in tensors)
    return numbers if mask is None else tuple(torch.where(mask != 0, tensor, 0.0) for tensor in numbers)
