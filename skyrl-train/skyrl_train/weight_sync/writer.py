"""Writers of a policy rank for all transports by which engines read from it."""

from collections.abc import Sequence

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import BytesLocation, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.broadcast import BroadcastWriter
from skyrl_train.weight_sync.checkpoint import CheckpointWriter
from skyrl_train.weight_sync.cuda_ipc import CudaIpcWriter
from skyrl_train.weight_sync.payload import Payload
from skyrl_train.weight_sync.shared_memory import SharedMemoryWriter
from skyrl_train.weight_sync.transport import Writer


class RankWriter:
    """Writers of one rank, one for each transport by which engines read from this rank; none if no engine does.

    Args:
        init_infos: connection of every engine.
        rank: this rank of the policy.
        device: device of its parameters.

    Raises:
        WeightSyncError: an engine did not join a process group.
    """

    def __init__(self, init_infos: Sequence[WeightSyncInitInfo], rank: int, device: torch.device):
        self._rank = rank
        self._engines = [index for index, info in enumerate(init_infos) if rank in info.sources]
        of_transport = {init_infos[index].transport: init_infos[index] for index in self._engines}
        self._writers = [_writer(info, device) for info in of_transport.values()]

    def write(self, payload: Payload, version: int, index: int) -> BytesLocation:
        """Write a bucket to locations that the engines of this rank can read.

        Raises:
            WeightSyncError: not enough memory or disk space; names bucket, rank and engines.
        """
        place = BytesLocation()
        try:
            for writer in self._writers:
                place |= writer.write(payload, version, index)  # each transport has separate fields
        except (OSError, RuntimeError, WeightSyncError) as error:
            raise WeightSyncError(
                f"weight sync failed at {payload.request(version=version, index=index).describe()}: policy rank "
                f"{self._rank} could not write it for engines {self._engines}: {error or type(error).__name__}"
            ) from error
        return place

    def transmit(self, request: WeightUpdateRequest) -> None:
        try:
            for writer in self._writers:
                writer.transmit(request)
        except WeightSyncError:
            self.abort()  # notifies engines that are still waiting
            raise

    def finish(self, version: int) -> None:
        for writer in self._writers:
            writer.finish(version)

    def abort(self) -> None:
        for writer in self._writers:
            writer.abort()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _writer(init_info: WeightSyncInitInfo, device: torch.device) -> Writer:
    match init_info.transport:
        case "shared_memory":
            return SharedMemoryWriter()
        case "cuda_ipc":
            return CudaIpcWriter(device)
        case "broadcast":
            return BroadcastWriter(init_info, device)
        case "checkpoint":
            return CheckpointWriter(init_info.directory)
