"""CUDA IPC transport: GPU memory owned by the trainer and opened by engines on the same GPU (`shared_memory` on a
device)."""

import base64

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.types import JsonObject
from skyrl_train.utils.cuda_allocator import disable_expandable_segments
from skyrl_train.weight_sync.base import BytesLocation, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Payload
from skyrl_train.weight_sync.transport import Reader, Writer

NUM_SLOTS = 2
"""The engines copy out of one while the trainer fills the other."""


def gpu_uuid(device: torch.device) -> str | None:
    """Return the identifier of a GPU, equal in every process independent of visible devices. None: a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


class CudaIpcWriter(Writer):
    """Trainer side of the CUDA IPC transport."""

    def __init__(self, device: torch.device):
        self._device = device
        self._uuid = gpu_uuid(device) or ""
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        self._handles: list[JsonObject] = [{} for _ in range(NUM_SLOTS)]

    def write(self, payload: Payload, version: int, index: int) -> BytesLocation:
        """Copy a bucket to memory that no engine is reading."""
        slot = index % NUM_SLOTS
        if payload.num_bytes > self._slots[slot].numel():
            with disable_expandable_segments():
                self._slots[slot] = torch.empty(payload.num_bytes, dtype=torch.uint8, device=self._device)
            self._handles[slot] = {self._uuid: _handle_of(self._slots[slot])}
        payload.copy_to(self._slots[slot][: payload.num_bytes])
        torch.cuda.synchronize(self._device)  # other processes do not see this one's streams
        return {"handles": self._handles[slot]}

    def close(self) -> None:
        self._slots.clear()


class CudaIpcReader(Reader):
    """Engine side of the CUDA IPC transport. The result is the trainer's memory: copy it, never write to it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._uuid = gpu_uuid(device) or ""
        self._opened: dict[str, torch.Tensor] = {}

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """Return the bucket's bytes [num_bytes] uint8, on the GPU.

        Raises:
            WeightSyncError: the memory is on another GPU, or shorter than declared.
        """
        torch.cuda.synchronize(self._device)  # the previous bucket may be overwritten from here on
        if request.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        handle = request.handles.get(self._uuid)
        if handle is None:
            raise WeightSyncError(
                f"the policy's ranks are on GPU {', '.join(request.handles)}, but this engine is on {self._uuid}; use "
                "generator.weight_sync_strategy=broadcast"
            )
        key = handle["memory"] + str(handle["offset"])
        if key not in self._opened:
            self._opened[key] = _open(handle, self._device)
            while len(self._opened) > NUM_SLOTS:
                self._opened.pop(next(iter(self._opened)))
        if self._opened[key].numel() < request.num_bytes:
            raise WeightSyncError(
                f"the trainer's GPU memory has {self._opened[key].numel()} bytes, but bucket {request.index} of "
                f"version {request.version} announces {request.num_bytes}"
            )
        return self._opened[key][: request.num_bytes]

    def close(self) -> None:
        self._opened.clear()


_BYTES = ("memory", "ref_counter", "event")
_FIELDS = ("device", "memory", "size", "offset", "ref_counter", "ref_counter_offset", "event", "event_sync_required")


def _handle_of(flat: torch.Tensor) -> JsonObject:
    """Return a JSON-serializable handle by which another process opens a tensor's memory."""
    shared = dict(zip(_FIELDS, flat.untyped_storage()._share_cuda_(), strict=True))
    return {name: base64.b64encode(value).decode() if name in _BYTES else value for name, value in shared.items()}


def _open(handle: JsonObject, device: torch.device) -> torch.Tensor:
    values = {name: base64.b64decode(value) if name in _BYTES else value for name, value in handle.items()}
    values["device"] = torch.cuda.current_device() if device.index is None else device.index
    storage = torch.UntypedStorage._new_shared_cuda(*values.values())
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
