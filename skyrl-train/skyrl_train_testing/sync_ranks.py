"""Ranks of a sharded policy that sends its weights and does not train, with engines in processes. No Ray, no model.

    with SyncRanks(num_ranks=4, num_engines=4, shapes=shapes, log_folder=folder, deadline_seconds=10) as policy:
        policy.connect(routes, most=1_000_000)
        policy.call("load", 1)
        policy.call("send", 1)

For tests and benchmarks of weight sync. Each rank is a process, and so is each engine; rank 0 starts the engines.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard, distribute_tensor

from skyrl_train.distributed.process_group import build_mesh, find_free_port, init_process_group
from skyrl_train.distributed.sharded_tensor import gather_full_tensor
from skyrl_train.errors import WeightSyncError
from skyrl_train.orchestration.process_ranks import ProcessRanks
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import Verification, fingerprints_of
from skyrl_train.weight_sync.lockstep import PolicyRanks
from skyrl_train.weight_sync.payload import NamedTensor
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.rank_part import RankPart
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train_testing.weight_holders import CPU, HolderInfo, HolderProcesses, WeightHolder

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


class SyncRank:
    """One rank; its methods are called on all ranks at once.

    Args:
        shapes: of the tensors, each divided over all ranks by rows.
        deadline_seconds: of a call to an engine.
    """

    def __init__(self, shapes: Shapes, num_engines: int, deadline_seconds: float):
        self._shapes = shapes
        self._num_engines = num_engines
        self._deadline_seconds = deadline_seconds
        self._end: WeightSender | RankPart | None = None
        self._engines: HolderProcesses | None = None

    def join(self, rank: int, world_size: int, port: int) -> None:
        """Form the group; the first rank starts the engines."""
        meeting: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "device": CPU}
        init_process_group(rank=rank, world_size=world_size, timeout_seconds=4 * self._deadline_seconds, **meeting)
        self._ranks, self._mesh = PolicyRanks(rank, world_size), build_mesh(CPU)
        if rank == 0:
            holder = partial(HeldWeights.of_shapes, self._shapes, torch.bfloat16)
            self._engines = HolderProcesses(self._num_engines, holder, self._deadline_seconds)
            self._engines.wait_for_start()

    def connect(self, infos: list[WeightSyncInitInfo], most: int) -> None:
        if self._end is not None:
            self._end.close()
        if self._engines is None:
            self._end = RankPart(infos, CPU, self._ranks, max_bucket_bytes=most)
        else:
            self._end = WeightSender(
                self._engines, infos, CPU, self._ranks, max_bucket_bytes=most, verification=infos[0].verification
            )

    def load(self, version: int) -> None:
        """Make this rank's part of the weights of a version."""
        self._parts = {
            name: distribute_tensor(tensor, self._mesh, [Shard(0)])
            for name, tensor in make_weights(self._shapes, version)
        }

    def send(self, version: int, most_delay: float = 0.0, kill_engine: int | None = None) -> dict[str, float]:
        """Send the loaded weights. `kill_engine` dies in the midst of it."""
        assert self._end is not None
        delays = random.Random(f"{self._ranks.rank} {version}")
        wait: Callable[[], None] = lambda: time.sleep(delays.uniform(0, most_delay))  # noqa: E731
        return self._end.send(self._gathered(wait, kill_engine), version).metrics

    def outcome_of_send(self, *args: Any) -> str:
        """Return the error of a `send`; empty: there was none."""
        try:
            self.send(*args)
        except WeightSyncError as error:
            return str(error)
        return ""

    def _gathered(self, wait: Callable[[], None], kill_engine: int | None) -> Iterator[NamedTensor]:
        for index, (name, part) in enumerate(self._parts.items()):
            if kill_engine is not None and self._engines is not None and index == len(self._parts) // 2:
                os.kill(self._engines.processes[kill_engine].pid, signal.SIGKILL)
            wait()
            yield name, gather_full_tensor(part)
            wait()

    def be_slow(self, engine: int, seconds: float) -> None:
        if self._engines is not None:
            self._engines.wait([self._engines.start(engine, HeldWeights.be_slow, seconds)])

    def restart(self, engine: int) -> None:
        if self._engines is not None:
            self._engines.restart(engine)

    def num_different(self, version: int) -> list[int]:
        """Return for each engine in how many tensors it differs from the weights of a version (on rank 0)."""
        if self._engines is None:
            return []
        expected = fingerprints_of(make_weights(self._shapes, version), version, "full")
        reports: list[dict[str, int]] = self._engines.wait(self._engines.call_all(HeldWeights.held, version))
        return [sum(report[name] != expected[name] for name in expected) for report in reports]


class SyncRanks:
    """The ranks and their engines. A context manager: leaving it ends them.

    Args:
        log_folder: each rank writes a log there.
        deadline_seconds: of a call to an engine; a collective may take four times as long.
    """

    def __init__(
        self, num_ranks: int, num_engines: int, shapes: Shapes, log_folder: Path, deadline_seconds: float = 60.0
    ):
        self._num_engines, self._deadline_seconds = num_engines, deadline_seconds
        args = (shapes, num_engines, deadline_seconds)
        self.ranks = ProcessRanks("policy", SyncRank, args, num_ranks=num_ranks, log_folder=log_folder)
        port = find_free_port()
        self._answers([("join", (rank, num_ranks, port)) for rank in range(num_ranks)])

    def __enter__(self) -> "SyncRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self.ranks.kill()

    def connect(self, routes: Sequence[Route], most: int, verification: Verification = "full") -> None:
        """Connect to the engines, one route each."""
        infos = init_infos_for(
            routes,
            [HolderInfo()] * self._num_engines,
            master_address="127.0.0.1",
            master_port=find_free_port(),
            verification=verification,
            timeout_seconds=self._deadline_seconds,
        )
        self.call("connect", infos, most)

    def call(self, method: str, *args: object) -> list[Any]:
        """Call a method of every rank. Returns: the answers in rank order."""
        return self._answers([(method, args)] * self.ranks.num_ranks)

    def _answers(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Any]:
        deadline = 120 + 8 * self._deadline_seconds
        answers: list[list[Any]] = asyncio.run(
            self.ranks.call([[call] for call in calls], deadline, "the kit's deadline")
        )
        return [answer for [answer] in answers]
