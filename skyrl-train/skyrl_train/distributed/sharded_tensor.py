"""Tensors sharded over ranks (torch's DTensor, parameters of DeepSpeed's stage 3)."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.distributed.zero_parameter import gather_zero_parameter, is_zero_parameter

T = TypeVar("T")

GATHERED_BYTES = 2**25
"""Size of the tensors that are gathered together: beyond it the transfer takes longer than the call."""


def gather_full_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a sharded tensor gathered, and any other tensor unchanged; without a gradient. A collective: every rank
    must call it.

    Args:
        dtype: dtype to cast to, before sending if possible. None: unchanged.
    """
    if is_zero_parameter(tensor):
        return gather_zero_parameter(tensor).to(dtype or tensor.dtype)
    tensor = tensor.detach().to(dtype or tensor.dtype)
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor() if _get_sharded_dimensions(tensor) else tensor.to_local()


def _get_sharded_dimensions(tensor: DTensor) -> list[int]:
    """Return the mesh dimensions over which a tensor is sharded, or partial."""
    mesh = tensor.device_mesh
    return [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate() and mesh.size(d) > 1]


def gather_full_tensors(tensors: Iterable[tuple[T, torch.Tensor, torch.dtype]]) -> Iterator[tuple[T, torch.Tensor]]:
    """Yield each tensor gathered, as `gather_full_tensor`, in order. Small ones with the same sharding are sent
    together, up to `GATHERED_BYTES`. A collective of every rank, which must pass the same tensors.

    Args:
        tensors: (key, tensor, dtype to cast to) of each.
    """
    batch: list[tuple[T, _EvenShard]] = []
    num_bytes = 0
    for name, tensor, dtype in tensors:
        shard = _get_even_shard(tensor, dtype)
        size = tensor.numel() * dtype.itemsize
        fits = shard is not None and num_bytes + size <= GATHERED_BYTES
        if batch and not (fits and shard is not None and shard.is_compatible_with(batch[0][1])):
            yield from _gather_together(batch)
            batch, num_bytes = [], 0
        if shard is None or size > GATHERED_BYTES:
            yield name, gather_full_tensor(tensor, dtype)
        else:
            batch.append((name, shard))
            num_bytes += size
    if batch:
        yield from _gather_together(batch)


class _EvenShard(NamedTuple):
    """This rank's shard of a tensor whose rows are split evenly over the ranks of a group."""

    part: torch.Tensor
    shape: torch.Size
    group: dist.ProcessGroup

    def is_compatible_with(self, other: "_EvenShard") -> bool:
        return self.group is other.group and self.part.dtype == other.part.dtype


def _get_even_shard(tensor: torch.Tensor, dtype: torch.dtype) -> _EvenShard | None:
    """Return this rank's shard; None for a tensor that is sharded in another way, or not at all."""
    if not isinstance(tensor, DTensor):
        return None
    mesh, divided = tensor.device_mesh, _get_sharded_dimensions(tensor)
    if len(divided) != 1 or tensor.placements[divided[0]] != Shard(0) or tensor.shape[0] % mesh.size(divided[0]):
        return None
    return _EvenShard(tensor.to_local().detach().to(dtype), tensor.shape, mesh.get_group(divided[0]))


def _gather_together(batch: list[tuple[T, _EvenShard]]) -> Iterator[tuple[T, torch.Tensor]]:
    own = torch.cat([shard.part.reshape(-1) for _, shard in batch])
    of_ranks = own.new_empty(dist.get_world_size(batch[0][1].group), own.numel())
    dist.all_gather(list(of_ranks), own, group=batch[0][1].group)
    start = 0
    for name, shard in batch:
        end = start + shard.part.numel()
        yield name, of_ranks[:, start:end].reshape(shard.shape)
        start = end


def copy_into(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into one that may be sharded: each rank copies its shard, without communication."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(whole)
        return
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
    tensor.to_local().copy_(whole[part])


def get_row_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the row range (start and end of the first dimension) that this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.dim() else 1
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(sizes[1:]) == tuple(tensor.shape[1:]), f"expected a tensor sharded by rows; got sizes {sizes}"
    return offsets[0], offsets[0] + sizes[0]
