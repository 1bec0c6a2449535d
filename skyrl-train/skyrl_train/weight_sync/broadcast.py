"""A process group of the trainer's rank 0 and every engine, beside whatever groups they are in already."""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightSyncInitInfo


class BroadcastGroup:
    """Bytes from rank 0 to all others over gloo or nccl. Creating it returns once every member has come.

    Args:
        init_info: where the group meets and which rank this process is.
        device: where this process wants the bytes (gloo moves them through host memory).
    """

    def __init__(self, init_info: WeightSyncInitInfo, device: torch.device):
        timeout = timedelta(seconds=init_info.timeout_seconds)
        self._is_sender = init_info.rank == 0
        self._group: Any  # the two kinds of group share no typed base
        try:
            store = TCPStore(
                init_info.master_address,
                init_info.master_port,
                init_info.world_size,
                is_master=self._is_sender,
                timeout=timeout,
            )
            if init_info.backend == "nccl":
                self._device = device
                from torch.distributed import ProcessGroupNCCL  # only in builds for CUDA

                options = ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = ProcessGroupNCCL(store, init_info.rank, init_info.world_size, options)
            else:
                self._device = torch.device("cpu")
                self._group = ProcessGroupGloo(store, init_info.rank, init_info.world_size, timeout)
        except RuntimeError as error:  # torch's DistError is one: a member did not come, the port is taken
            raise WeightSyncError(
                f"rank {init_info.rank} of {init_info.world_size} could not join the weight-sync group at "
                f"{init_info.master_address}:{init_info.master_port} within {init_info.timeout_seconds:.0f} s: {error}"
            ) from error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Sends (rank 0) or fills (others) `flat` [num_bytes] uint8. Every member must call it."""
        on_group = flat.to(self._device)
        try:
            self._group.broadcast(on_group, 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"a member of the weight-sync group died or did not answer in time: {error}"
            ) from error
        if not self._is_sender and on_group is not flat:
            flat.copy_(on_group)

    def receive_bytes(self, num_bytes: int) -> torch.Tensor:
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self.broadcast(flat)
        return flat

    def close(self) -> None:
        shutdown = getattr(self._group, "shutdown", None)
        if shutdown is not None:
            shutdown()
