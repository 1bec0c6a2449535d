"""A rank's end of the transports: where it puts buckets for the engines that take them from it."""

from collections.abc import Iterable, Sequence

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import Place, WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.broadcast import BroadcastWriter
from skyrl_train.weight_sync.checkpoint import CheckpointWriter
from skyrl_train.weight_sync.cuda_ipc import CudaIpcWriter
from skyrl_train.weight_sync.payload import Payload
from skyrl_train.weight_sync.shared_memory import SharedMemoryWriter
from skyrl_train.weight_sync.transport import Writer


class RankWriter:
    """The writers of one rank, one for each transport by which engines take buckets from it; none if no engine does.

    Args:
        init_infos: of every engine.
        rank: the rank of the policy that this is.
        device: where its parameters are.

    Raises:
        WeightSyncError: an engine did not join a process group.
    """

    def __init__(self, init_infos: Sequence[WeightSyncInitInfo], rank: int, device: torch.device):
        self._rank = rank
        self._engines = [index for index, info in enumerate(init_infos) if rank in info.sources]
        of_transport = {init_infos[index].transport: init_infos[index] for index in self._engines}
        self._writers = [_writer(info, device) for info in of_transport.values()]

    def write(self, payload: Payload, version: int, index: int) -> Place:
        """Put a bucket where the engines of this rank can read it.

        Raises:
            WeightSyncError: there is no memory or disk for it; names bucket, rank and engines.
        """
        place = Place()
        try:
            for writer in self._writers:
                place |= writer.write(payload, version, index)  # each transport has fields of its own
        except (OSError, RuntimeError, WeightSyncError) as error:
            raise WeightSyncError(
                f"weight sync failed at {payload.name(version, index)}: policy rank {self._rank} could not write it "
                f"for engines {self._engines}: {error or type(error).__name__}"
            ) from error
        return place

    def transmit(self, request: WeightUpdateRequest) -> None:
        try:
            for writer in self._writers:
                writer.transmit(request)
        except WeightSyncError:
            self.abort()  # the engines that are still waiting learn of it
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


def place_for(info: WeightSyncInitInfo, places: Sequence[Place]) -> Place:
    """Return the place of a bucket for one engine.

    Args:
        places: of each rank.
    """
    own = [places[rank] for rank in info.sources]
    # One engine may have processes on several GPUs: each picks the handle of its own.
    return {"location": own[0].get("location", ""), "handles": _merged(place.get("handles", {}) for place in own)}


def _merged(handles: Iterable[dict[str, object]]) -> dict[str, object]:
    return {gpu: handle for of_rank in handles for gpu, handle in of_rank.items()}


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
