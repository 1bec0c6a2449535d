"""Tensors that are divided over ranks (torch's DTensor, parameters of DeepSpeed's stage 3)."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.distributed.zero_parameter import gather_zero_parameter, is_zero_parameter


def gather_full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the whole of a sharded tensor, and any other tensor as it is; without a gradient. A collective: every rank
    must call it.

    Args:
        dtype: what it is cast to, each rank's part before it travels where that can be done. None: as it is.
    """
    if is_zero_parameter(tensor):
        return gather_zero_parameter(tensor).to(dtype or tensor.dtype)
    tensor = tensor.detach().to(dtype or tensor.dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_into(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Write a whole tensor into one that may be sharded: each rank takes its part, without communication."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
    tensor.to_local().copy_(whole[part])


def rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the rows (first and behind the last, of the first dimension) that this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(sizes[1:]) == tuple(tensor.shape[1:]), f"a tensor that is divided by rows was expected: {sizes}"
    return offsets[0], offsets[0] + sizes[0]
