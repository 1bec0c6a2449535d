"""The smallest policy ranks there are: they send given tensors. For tests and benchmarks of weight sync without Ray and
without a model.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch

from skyrl_train.inference_engines.loop_thread import LoopThread
from skyrl_train.weight_sync.base import WeightSource, WeightSyncInitInfo, WeightUpdates, WrittenBucket
from skyrl_train.weight_sync.payload import NamedTensor
from skyrl_train.weight_sync.rank_sender import RankSender
from skyrl_train.weight_sync.sender import SyncResult, WeightSender


class TensorSource(WeightSource):
    """A policy rank that sends `tensors`.

    Args:
        parameters: yields the parameters of each sync; None: `tensors`.
    """

    sender: RankSender | None = None

    def __init__(
        self,
        max_bucket_bytes: int,
        rank: int = 0,
        device: torch.device | None = None,
        parameters: Callable[[], Iterable[NamedTensor]] | None = None,
    ):
        self.rank = rank
        self.tensors: Iterable[NamedTensor] = []
        self._parameters = parameters or (lambda: self.tensors)
        self._max_bucket_bytes = max_bucket_bytes
        self._device = device or torch.device("cpu")

    def connect_engines(self, init_infos: Sequence[WeightSyncInitInfo]) -> None:
        self.close()
        self.sender = RankSender(
            init_infos, self.rank, self._device, self._parameters, max_bucket_bytes=self._max_bucket_bytes
        )

    def stage_bucket(self, version: int, index: int) -> bool:
        return self._connected.stage_bucket(version, index)

    def write_bucket(self, version: int, index: int, held_version: int | None) -> WrittenBucket:
        return self._connected.write_bucket(version, index, held_version)

    def finish_sync(self, version: int) -> None:
        self._connected.finish(version)

    def abort_sync(self) -> None:
        if self.sender is not None:
            self.sender.abort()

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()

    @property
    def _connected(self) -> RankSender:
        assert self.sender is not None
        return self.sender


class RanksInThreads:
    """Policy ranks of this process, each in a thread."""

    def __init__(self, ranks: Sequence[WeightSource]):
        self._ranks = ranks
        self._threads = [ThreadPoolExecutor(1) for _ in ranks]
        self.num_ranks = len(ranks)

    async def call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        loop = asyncio.get_running_loop()
        calls = [
            loop.run_in_executor(thread, getattr(rank, method.__name__), *args)
            for thread, rank in zip(self._threads, self._ranks, strict=True)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        yield


async def send_once(
    source: WeightSource, engines: Sequence[WeightUpdates], init_infos: Sequence[WeightSyncInitInfo], version: int = 1
) -> SyncResult:
    """Connect one rank to engines and send its weights."""
    sender = WeightSender(RanksInThreads([source]), engines, init_infos)
    await sender.connect()
    return await sender.send(version)


class BlockingSender:
    """A `WeightSender` from one rank in a thread, for tests that are not asynchronous."""

    def __init__(
        self,
        engines: Sequence[WeightUpdates],
        init_infos: Sequence[WeightSyncInitInfo],
        device: torch.device | None = None,
        *,
        max_bucket_bytes: int,
    ):
        self._loop = LoopThread("weight-sync")
        self.source = TensorSource(max_bucket_bytes, device=device)
        self._sender = WeightSender(RanksInThreads([self.source]), engines, init_infos)
        self._loop.call_from_thread(self._sender.connect())
        self.is_staged = self._sender.is_staged

    def stage(self, tensors: Iterable[NamedTensor], version: int) -> None:
        self.source.tensors = tensors
        self._loop.call_from_thread(self._sender.stage(version))

    def send(self, tensors: Iterable[NamedTensor] | None, version: int) -> SyncResult:
        """Stage, if necessary, and send. `tensors`: None if they are staged."""
        if tensors is not None:
            self.source.tensors = tensors
            if self.is_staged:
                self.stage(tensors, version)
        return self._loop.call_from_thread(self._sender.send(version))

    def close(self) -> None:
        self._loop.stop()
        self.source.close()
