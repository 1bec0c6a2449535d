"""Engine side of weight sync: converts requests to named tensors, for any transport."""

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.broadcast import BroadcastReader
from skyrl_train.weight_sync.checkpoint import CheckpointReader
from skyrl_train.weight_sync.cuda_ipc import CudaIpcReader
from skyrl_train.weight_sync.delta_decoder import DeltaDecoder
from skyrl_train.weight_sync.payload import Bucket, check_announced, split_bytes
from skyrl_train.weight_sync.shared_memory import SharedMemoryReader
from skyrl_train.weight_sync.transport import Reader


class WeightReceiver:
    """Decoder of the update requests of one connection into named tensors.

    Args:
        init_info: the trainer's connection to this engine.
        device: device of the engine; tensors are returned there or on the host.
        process_index: index of this process in the engine.
    """

    def __init__(self, init_info: WeightSyncInitInfo, device: torch.device, process_index: int = 0):
        self._reader: Reader = _create_reader(init_info, device, process_index)
        self._changes = DeltaDecoder(init_info.directory) if init_info.encoding == "delta" else None
        self._version: int | None = None  # of the open update
        self._next_index = 0
        self._names: set[str] = set()
        self._names_before: set[str] | None = None

    def receive(self, request: WeightUpdateRequest) -> Bucket:
        """Receive the bucket's parameters in the sender's order and dtype. They are read-only and valid until the next
        `receive`. Bucket 0 starts an update and discards an unfinished one.

        Raises:
            WeightSyncError: a bucket is missing or has another version, the bytes do not match, or the transport
                failed.
        """
        self._check_order(request)
        if request.base_version is None:
            check_announced(request)
        flat = self._reader.read(request)
        bucket = split_bytes(request, flat) if self._changes is None else self._changes.receive(request, flat)
        # Counted after reading, so that errors name the missing bucket.
        self._next_index += 1
        self._names.update(request.names)
        return bucket

    def finish(self, version: int) -> None:
        """Finish the update.

        Raises:
            WeightSyncError: no update to `version` is open, or tensors of the previous update are missing.
        """
        if version != self._version:
            raise WeightSyncError(f"an update to version {version} was finished, but {self._state()}")
        # A sync without a tensor would silently leave an older version of it in the engine.
        missing = sorted((self._names_before or set()) - self._names)
        if missing:
            raise WeightSyncError(
                f"the update to version {version} ended without {len(missing)} tensors of the update before, such as "
                f"{missing[0]!r}"
            )
        self._version, self._names_before = None, self._names
        if self._changes is not None:
            self._changes.finish(version)

    def close(self) -> None:
        self._reader.close()
        if self._changes is not None:
            self._changes.close()

    def _check_order(self, request: WeightUpdateRequest) -> None:
        if request.index == 0:
            # Bucket 0 discards an open update, since the trainer repeats a failed sync completely.
            self._version, self._next_index, self._names = request.version, 0, set()
        if (request.version, request.index) != (self._version, self._next_index):
            raise WeightSyncError(f"bucket {request.index} of version {request.version} came, but {self._state()}")
        repeated = self._names.intersection(request.names)
        if repeated:
            raise WeightSyncError(f"tensor {min(repeated)!r} came twice in the update to version {request.version}")

    def _state(self) -> str:
        if self._version is None:
            return "no update is open: its first bucket is missing, or it was finished early"
        return f"the update to version {self._version} is open and waits for bucket {self._next_index}"


def _create_reader(init_info: WeightSyncInitInfo, device: torch.device, process_index: int) -> Reader:
    match init_info.transport:
        case "shared_memory":
            return SharedMemoryReader(init_info.sources[0])
        case "cuda_ipc":
            return CudaIpcReader(device)
        case "broadcast":
            return BroadcastReader(init_info, device, process_index)
        case "checkpoint":
            return CheckpointReader()
