"""Ranks of a sharded policy that sends its weights and does not train, with engines in processes. No Ray, no model.

    with SyncRanks(num_ranks=4, num_engines=4, shapes=shapes, log_folder=folder, deadline_seconds=10) as policy:
        policy.connect(routes, most=1_000_000)
        policy.call("load", 1)
        policy.send(1)

For tests and benchmarks of weight sync. Each rank is a process, and so is each engine.
"""

import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl_train.distributed.process_group import build_mesh, find_free_port, init_process_group
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.errors import WeightSyncError
from skyrl_train.inference_engines.loop_thread import LoopThread
from skyrl_train.orchestration.process_ranks import ProcessRanks
from skyrl_train.weight_sync.base import WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of
from skyrl_train.weight_sync.payload import NamedTensor
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.sender import SyncResult, WeightSender
from skyrl_train_testing.weight_holders import CPU, HolderInfo, HolderProcesses, WeightHolder
from skyrl_train_testing.weight_sources import TensorSource

T = TypeVar("T")
Shapes = list[tuple[str, tuple[int, ...]]]


def make_weights(shapes: Shapes, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random bits that every process makes alike."""
    for index, (name, shape) in enumerate(shapes):
        generator = torch.Generator().manual_seed(1000 * version + index)
        yield name, torch.randn(shape, generator=generator).bfloat16()


class HeldWeights(WeightHolder):
    """An engine that can be slow, and tells what it holds."""

    _delay_seconds = 0.0

    def be_slow(self, seconds: float) -> None:
        """Wait so long before each bucket from now on."""
        self._delay_seconds = seconds

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        time.sleep(self._delay_seconds)
        super().update_named_weights(request)

    def held(self, version: int) -> dict[str, int]:
        """Return the fingerprint of every byte of every tensor."""
        return fingerprints_of(self.parameters.items(), version, "full")


class SyncRank(TensorSource):
    """One rank; its methods are called on all ranks at once.

    Args:
        shapes: of the tensors, each divided over all ranks by rows.
        most: `max_bucket_bytes`.
        deadline_seconds: a collective may take four times as long.
    """

    def __init__(self, shapes: Shapes, most: int, deadline_seconds: float):
        super().__init__(most, parameters=self._gather)
        self._shapes, self._deadline_seconds = shapes, deadline_seconds
        self._most_delay = 0.0
        self._delays = random.Random()

    def join(self, rank: int, world_size: int, port: int) -> None:
        """Form the group."""
        meeting: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "device": CPU}
        init_process_group(rank=rank, world_size=world_size, timeout_seconds=4 * self._deadline_seconds, **meeting)
        self.rank, self._mesh = rank, build_mesh(CPU)

    def load(self, version: int, most_delay: float = 0.0) -> None:
        """Make this rank's part of the weights of a version, gathered with random delays up to `most_delay`."""
        self._most_delay, self._delays = most_delay, random.Random(f"{self.rank} {version}")
        self._parts = {
            name: distribute_tensor(tensor, self._mesh, [Shard(0)])
            for name, tensor in make_weights(self._shapes, version)
        }

    def _gather(self) -> Iterator[NamedTensor]:
        for name, part in self._parts.items():
            time.sleep(self._delays.uniform(0, self._most_delay))
            yield name, gather_full_tensor(part)
            time.sleep(self._delays.uniform(0, self._most_delay))


class SyncRanks:
    """The ranks, their engines, and a sender. A context manager: leaving it ends them.

    Args:
        most: `max_bucket_bytes`.
        log_folder: each rank writes a log there.
        deadline_seconds: of a call to an engine; a collective may take four times as long.

    Attributes:
        ranks: the processes of the ranks.
        engines: the processes of the engines.
    """

    def __init__(
        self,
        num_ranks: int,
        num_engines: int,
        shapes: Shapes,
        log_folder: Path,
        *,
        most: int,
        deadline_seconds: float = 60.0,
    ):
        self.num_ranks, self._shapes, self._deadline_seconds = num_ranks, shapes, deadline_seconds
        holder = partial(HeldWeights.of_shapes, shapes, torch.bfloat16)
        self.engines = HolderProcesses(num_engines, holder, deadline_seconds)
        args = (shapes, most, deadline_seconds)
        self.ranks = ProcessRanks("policy", SyncRank, args, num_ranks=num_ranks, log_folder=log_folder)
        self.engines.wait_for_start()
        self._loop = LoopThread("weight-sync")  # locks belong to one event loop
        port = find_free_port()
        self.run(self._call([("join", (rank, num_ranks, port)) for rank in range(num_ranks)]))
        self._sender: WeightSender | None = None

    def __enter__(self) -> "SyncRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop()
        self.ranks.kill()
        self.engines.__exit__(None, None, None)

    # ---- as the sender sees them

    async def call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return await self._call([(method.__name__, args)] * self.num_ranks)

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[None]:
        yield

    # ---- for tests

    def connect(self, routes: Sequence[Route], verification: Verification = "full") -> None:
        """Connect to the engines, one route each."""
        infos = init_infos_for(
            routes,
            [HolderInfo()] * len(routes),
            master_address="127.0.0.1",
            master_port=find_free_port(),
            verification=verification,
            timeout_seconds=self._deadline_seconds,
        )
        self._sender = WeightSender(self, self.engines.engines, infos)
        self.run(self._sender.connect())

    def load(self, version: int, most_delay: float = 0.0) -> None:
        """See `SyncRank.load`."""
        self.run(self.call_all(SyncRank.load, version, most_delay))

    def send(self, version: int) -> SyncResult:
        """Send the loaded weights."""
        return self.run(self.start_send(version))

    async def start_send(self, version: int) -> SyncResult:
        assert self._sender is not None
        return await self._sender.send(version)

    def get_error_of_send(self, version: int) -> str:
        """Return the error of a `send`; empty: it succeeded."""
        try:
            self.send(version)
        except WeightSyncError as error:
            return str(error)
        return ""

    def count_different(self, version: int) -> list[int]:
        """Return for each engine in how many tensors it differs from the weights of a version."""
        expected = fingerprints_of(make_weights(self._shapes, version), version, "full")
        reports = self.engines.call_all("held", version)
        return [sum(report[name] != expected[name] for name in expected) for report in reports]

    async def _call(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Any]:
        deadline = 120 + 8 * self._deadline_seconds
        answers = await self.ranks.call([[call] for call in calls], deadline, "the kit's deadline")
        return [answer for [answer] in answers]

    def run(self, call: Coroutine[None, None, T]) -> T:
        """Run a coroutine in the event loop of the sender."""
        return self._loop.call_from_thread(call)
