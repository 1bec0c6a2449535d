"""Host memory that holds the tensors of a model while another model or an engine uses the device.

Storages are copied as bytes and freed, and the tensors read from host memory meanwhile: checkpoints of an offloaded
model need no device. Views that others hold of a storage (FSDP's flat shards, Megatron's and DeepSpeed's buffers) are
valid again after `onload`, which fills the same storages.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from skyrl_train.errors import WorkerMemoryError

_ALIGNMENT = 64
"""Bytes: a multiple of the size of every dtype, and of a cache line."""


class Transfer(NamedTuple):
    """Copy between a device and host memory."""

    num_bytes: int
    seconds: float


class HostStore:
    """Buffers in host memory, allocated once and reused by every offload: page-locked for CUDA, where copies run on a
    stream of their own; plain memory for a CPU, with the same steps.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._buffers: list[torch.Tensor] = []
        self._position = (0, 0)  # buffer, and first free byte in it
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id -> tensor, and its alias on the device
        self._copies: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the buffers take."""
        return sum(buffer.numel() for buffer in self._buffers)

    @torch.no_grad()
    def offload(self, tensors: Iterable[torch.Tensor]) -> Transfer:
        """Copy tensors to host memory and free their storages on the device. Tensors on another device, in mapped
        files, or moved already are left alone."""
        begun = time.perf_counter()
        by_storage = self._group_by_storage(tensors)
        sizes = [storage.nbytes() for storage, _ in by_storage]
        copies = list(zip((storage for storage, _ in by_storage), self._allocate(sizes), strict=True))
        with self._copying():
            for storage, host in copies:
                host.copy_(_view_bytes(storage), non_blocking=True)
        for (storage, sharers), (_, host) in zip(by_storage, copies, strict=True):
            for tensor in sharers:
                self._moved[id(tensor)] = (tensor, tensor.data)
                tensor.data = _view_like(tensor, host)
            storage.resize_(0)
        self._copies += copies
        return Transfer(sum(sizes), time.perf_counter() - begun)

    @torch.no_grad()
    def onload(self) -> Transfer:
        """Copy everything back, with what was written to it meanwhile."""
        begun = time.perf_counter()
        for storage, host in self._copies:
            storage.resize_(host.numel())
        with self._copying():
            for storage, host in self._copies:
                _view_bytes(storage).copy_(host, non_blocking=True)
        for tensor, alias in self._moved.values():
            tensor.data = alias
        num_bytes = sum(host.numel() for _, host in self._copies)
        self._moved, self._copies, self._position = {}, [], (0, 0)
        return Transfer(num_bytes, time.perf_counter() - begun)

    def _group_by_storage(
        self, tensors: Iterable[torch.Tensor]
    ) -> list[tuple[torch.UntypedStorage, list[torch.Tensor]]]:
        """Return each storage with the tensors in it: tied weights and views of one buffer share one."""
        found: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
        for tensor in tensors:
            # Of a DTensor, whose module is heavy, and whose `to_local` returns a view.
            local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
            storage = local.untyped_storage()
            if local.device.type != self.device.type or id(local) in self._moved or not storage.nbytes():
                continue
            if not storage.resizable():  # a mapped file, on a CPU
                continue
            sharers = found.setdefault(storage.data_ptr(), (storage, []))[1]
            if not any(local is other for other in sharers):
                sharers.append(local)
        return list(found.values())

    def _allocate(self, sizes: list[int]) -> list[torch.Tensor]:
        """Return a part of the buffers for each size. A step that moves what the last one moved allocates nothing."""
        parts = []
        number, start = self._position
        for index, size in enumerate(sizes):
            while number < len(self._buffers) and start + size > self._buffers[number].numel():
                number, start = number + 1, 0
            if number == len(self._buffers):  # for all that follow
                missing = sum(_align(each) for each in sizes[index:])
                self._buffers.append(_allocate_host(missing, pinned=self._stream is not None))
            parts.append(self._buffers[number][start : start + size])
            start += _align(size)
        self._position = number, start
        return parts

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Run copies on the stream of this store, after the work of the current stream, and wait for them."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
            done = self._stream.record_event()
        # The host waits: afterwards another process takes the memory, or kernels of any stream read it.
        done.synchronize()


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _allocate_host(size: int, *, pinned: bool) -> torch.Tensor:
    """Return bytes of host memory. They are page-locked in place: torch's allocator of pinned memory rounds sizes up to
    powers of two."""
    buffer = torch.empty(size, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart() if pinned else None
    if pinned and (code := int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))):
        raise WorkerMemoryError(
            f"CUDA cannot page-lock {size / 1e9:.1f} GB of host memory for an offloaded model (error {code}): free "
            "host memory, raise the container's limit, or keep the models on the device with "
            "trainer.placement.offload=keep"
        )
    return buffer


def _view_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _view_like(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """Return the view of a copied storage that a tensor has of the original one."""
    first = int(host.storage_offset()) // tensor.element_size() + int(tensor.storage_offset())
    return torch.empty(0, dtype=tensor.dtype).set_(host.untyped_storage(), first, tensor.size(), tensor.stride())
