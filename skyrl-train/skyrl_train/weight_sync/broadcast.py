"""Broadcast transport: from the trainer's rank 0 to every process of every engine, in a separate process group."""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import BytesLocation, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Buffer, Payload
from skyrl_train.weight_sync.transport import Reader, Writer


class BroadcastGroup:
    """Process group over gloo or nccl in which rank 0 sends. The constructor returns after every member has joined.

    Args:
        init_info: rendezvous of the group.
        device: destination of the bytes in this process (gloo copies them through host memory).
        rank: rank of this process in the group.
    """

    def __init__(self, init_info: WeightSyncInitInfo, device: torch.device, rank: int):
        timeout = timedelta(seconds=init_info.timeout_seconds)
        self.device = device if init_info.backend == "nccl" else torch.device("cpu")
        self._group: Any  # the two group classes have no common typed base
        try:
            store = TCPStore(
                init_info.master_address, init_info.master_port, init_info.world_size, rank == 0, timeout=timeout
            )
            if init_info.backend == "nccl":
                from torch.distributed import ProcessGroupNCCL  # only in CUDA builds

                options = ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = ProcessGroupNCCL(store, rank, init_info.world_size, options)
            else:
                self._group = ProcessGroupGloo(store, rank, init_info.world_size, timeout)
        except RuntimeError as error:  # includes torch's DistError: a member did not join, or the port is in use
            raise WeightSyncError(
                f"rank {rank} of {init_info.world_size} could not join the weight-sync group at "
                f"{init_info.master_address}:{init_info.master_port} within {init_info.timeout_seconds:.0f} s: {error}"
            ) from error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send (rank 0) or receive (other ranks) `flat` on the group's device. A collective.

        Raises:
            WeightSyncError: a member crashed or timed out, or the group was aborted.
        """
        group = self._group
        if group is None:
            raise WeightSyncError("the weight-sync group was left")
        try:
            group.broadcast(flat, 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"a member of the weight-sync group died or did not answer in time: {error}"
            ) from error

    def abort(self) -> None:
        """Abort pending calls of other threads and members with an error."""
        if self._group is not None:
            self._group.abort()
        self._group = None  # closes its connections, by which the other members are notified

    def close(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._group = None


class BroadcastWriter(Writer):
    """Trainer side of the broadcast transport."""

    def __init__(self, init_info: WeightSyncInitInfo, device: torch.device):
        self._group = BroadcastGroup(init_info, device, rank=0)
        self._buffers = [Buffer(self._group.device) for _ in range(2)]  # one is sent while the other is filled

    def write(self, payload: Payload, version: int, index: int) -> BytesLocation:
        """Copy a bucket into one contiguous buffer."""
        payload.copy_to(self._buffers[index % 2].first(payload.num_bytes))
        return {}

    def transmit(self, request: WeightUpdateRequest) -> None:
        """Send a bucket; the engines must have been notified."""
        self._group.broadcast(_encode_header(request, self._group.device))
        if request.num_bytes:
            self._group.broadcast(self._buffers[request.index % 2].first(request.num_bytes))

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()


class BroadcastReader(Reader):
    """Engine side of the broadcast transport, in one process."""

    def __init__(self, init_info: WeightSyncInitInfo, device: torch.device, process_index: int):
        self._group = BroadcastGroup(init_info, device, rank=init_info.rank + process_index)
        self._buffer = Buffer(self._group.device)

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """Receive the bucket's bytes [num_bytes] uint8, on the group's device.

        Raises:
            WeightSyncError: the trainer sends another bucket, or a member crashed or timed out.
        """
        expected = _encode_header(request, self._group.device)
        header = torch.empty_like(expected)
        self._group.broadcast(header)
        if not torch.equal(header, expected):  # members that expect different lengths would crash or wait forever
            version, index, num_bytes = header.tolist()
            raise WeightSyncError(
                f"bucket {request.index} of version {request.version} announces {request.num_bytes} bytes, but the "
                f"trainer sends bucket {index} of version {version}, {num_bytes} bytes"
            )
        flat = self._buffer.first(request.num_bytes)
        if flat.numel():
            self._group.broadcast(flat)
        return flat

    def close(self) -> None:
        self._group.close()


def _encode_header(request: WeightUpdateRequest, device: torch.device) -> torch.Tensor:
    """Encode the header of a bucket, [3] int64."""
    return torch.tensor([request.version, request.index, request.num_bytes], device=device)
