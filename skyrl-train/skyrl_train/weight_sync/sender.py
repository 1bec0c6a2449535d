"""The trainer's end of weight sync: parameters in, verified weights in every engine out.

Parameters come one at a time and leave in buckets, so that the extra memory is one bucket, never a second model.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.broadcast import BroadcastGroup
from skyrl_train.weight_sync.checksum import MODULUS, checksum_of


class EngineHandles(Protocol):
    """The engines, wherever they run. Calls start at once; `wait` ends them, by their answers or an error."""

    def call_all(self, method: str, *args: Any) -> list[Any]:
        """The same call to every engine."""
        ...

    def call_each(self, method: str, args: Sequence[Any]) -> list[Any]:
        """The i-th argument to the i-th engine."""
        ...

    def wait(self, calls: list[Any]) -> list[Any]: ...

    def share(self, value: Any) -> Any:
        """`value` where every engine can read it without a copy each; an argument for `call_all`."""
        ...


Bucket = list[tuple[str, torch.Tensor]]


def buckets_of(parameters: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, max_bytes: int) -> Iterator[Bucket]:
    """Consecutive parameters in `dtype`, gathered until a bucket would pass `max_bytes` (one larger stands alone)."""
    bucket: Bucket = []
    size = 0
    for name, parameter in parameters:
        converted = parameter.detach().to(dtype)
        num_bytes = converted.numel() * converted.itemsize
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, converted))
        size += num_bytes
    if bucket:
        yield bucket


def flatten(bucket: Bucket) -> torch.Tensor:
    """A bucket's bytes one after the other. [num_bytes] uint8"""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket])


class WeightSender:
    """Sends a model to all engines and proves that it arrived.

    Args:
        engines: every engine that must hold the weights.
        init_infos: this process's (rank 0 of the group) and each engine's.
        device: where the parameters are.
    """

    def __init__(self, engines: EngineHandles, init_infos: Sequence[WeightSyncInitInfo], device: torch.device):
        own_info, *engine_infos = init_infos
        self._engines = engines
        engines.wait(engines.call_all("weight_version"))  # a group waits long for an engine that could not start
        joining = engines.call_each("init_weight_update_communicator", engine_infos)
        self._group = BroadcastGroup(own_info, device) if own_info.strategy == "broadcast" else None
        engines.wait(joining)

    def send(self, buckets: Iterable[Bucket], version: int) -> dict[str, float]:
        """Streams the buckets to every engine, which then takes on `version`.

        Returns:
            `bytes` sent, `chunks`.

        Raises:
            WeightSyncError: an engine's weights differ from the trainer's afterwards.
        """
        checksum, num_bytes, num_chunks = 0, 0, 0
        for bucket in buckets:
            self._send_bucket(bucket)
            checksum += checksum_of(bucket)
            num_bytes += sum(tensor.numel() * tensor.itemsize for _, tensor in bucket)
            num_chunks += 1
        checksum %= MODULUS
        answers = self._engines.wait(self._engines.call_all("finish_weight_update", version))
        wrong = [index for index, answer in enumerate(answers) if answer != checksum]
        if wrong:
            raise WeightSyncError(
                f"after the sync of version {version}, engine(s) {wrong} hold other weights than the trainer "
                f"(checksum {[answers[index] for index in wrong]}, expected {checksum}). Do both load the same model, "
                "and is generator.model_dtype the dtype the engine computes in?"
            )
        return {"bytes": float(num_bytes), "chunks": float(num_chunks)}

    def _send_bucket(self, bucket: Bucket) -> None:
        flat = flatten(bucket)
        request = WeightUpdateRequest(
            names=[name for name, _ in bucket],
            dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            shapes=[tuple(tensor.shape) for _, tensor in bucket],
            buffer=flat.cpu().numpy() if self._group is None else None,
        )
        receiving = self._engines.call_all("update_named_weights", self._engines.share(request))
        if self._group is not None:
            try:
                self._group.broadcast(flat)
            except WeightSyncError:
                self._engines.wait(receiving)  # a dead engine says here which one it was
                raise
        self._engines.wait(receiving)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
