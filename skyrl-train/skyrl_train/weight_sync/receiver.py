"""An engine's end of weight sync: named tensors out of requests, whichever way the bytes came."""

import math
from typing import Protocol

import numpy as np
import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest


class ByteSource(Protocol):
    """Where the bytes of a chunk that did not travel with the request come from (a process group)."""

    def receive_bytes(self, num_bytes: int) -> torch.Tensor: ...

    def close(self) -> None: ...


def num_bytes_of(request: WeightUpdateRequest) -> int:
    """Bytes in the flat buffer of a chunk."""
    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize
        for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
    )


def split_bytes(request: WeightUpdateRequest, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of `flat` (uint8, one dimension) as the request's named tensors."""
    expected = num_bytes_of(request)
    if flat.numel() != expected:
        raise WeightSyncError(f"a weight chunk of {len(request)} parameters needs {expected} bytes; got {flat.numel()}")
    tensors, start = [], 0
    for name, dtype_name, shape in zip(request.names, request.dtypes, request.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        part = flat[start : start + size]
        if part.storage_offset() % dtype.itemsize:  # a view needs aligned bytes
            part = part.clone()
        tensors.append((name, part.view(dtype).view(shape)))
        start += size
    return tensors


class WeightReceiver:
    """Turns requests into named tensors. The tensors are valid until the next `receive`; copy them at once."""

    def __init__(self, init_info: WeightSyncInitInfo, device: torch.device):
        self._group: ByteSource | None = None
        if init_info.strategy == "broadcast":
            from skyrl_train.weight_sync.broadcast import BroadcastGroup

            self._group = BroadcastGroup(init_info, device)

    def receive(self, request: WeightUpdateRequest) -> list[tuple[str, torch.Tensor]]:
        """The chunk's parameters, in the sender's order and dtype.

        Raises:
            WeightSyncError: the bytes do not fit the request, or the group broke.
        """
        if self._group is not None:
            return split_bytes(request, self._group.receive_bytes(num_bytes_of(request)))
        if request.buffer is None:
            raise WeightSyncError("a weight chunk came without bytes, but this engine was set up for shared memory")
        # The bytes lie in shared, read-only memory; they are only read.
        writable = np.frombuffer(request.buffer, dtype=np.uint8)
        return split_bytes(request, _from_readonly(writable))

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _from_readonly(array: np.ndarray) -> torch.Tensor:
    """A tensor over a read-only array. Nobody writes to it: `torch.from_numpy` alone would warn that somebody could."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)
