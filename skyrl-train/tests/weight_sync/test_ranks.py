"""Policy ranks gather together and hand their part to their own engines, or all stop at the same bucket."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.weight_sync import rank_sender
from skyrl_train.weight_sync.base import WeightSyncInitInfo, WeightUpdateRequest
from skyrl_train.weight_sync.fingerprint import fingerprints_of
from skyrl_train.weight_sync.payload import NamedTensor
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.sender import SyncResult, WeightSender
from skyrl_train.weight_sync.shared_memory import SharedMemoryReader
from skyrl_train_testing.weight_holders import HolderInfo, WeightHolder, engines_in_threads
from skyrl_train_testing.weight_sources import RanksInThreads, TensorSource

NUM_RANKS = 4
NAMES = [f"layer.{i}" for i in range(6)]
OWN_RANK = [Route("shared_memory", sources=(rank,)) for rank in range(NUM_RANKS)]
Gather = Callable[["Rank", str, int], torch.Tensor]


class Rank(TensorSource):
    """One of four ranks in threads, which gather together. A bucket has two parameters."""

    def __init__(self, rank: int, meeting: threading.Barrier, gather: Gather):
        super().__init__(4 * 400, rank, parameters=self._gather_all)
        self.version, self.gather, self._meeting = 0, gather, meeting
        self.at: list[str] = []
        """Parameters in the order in which they were gathered."""

    def _gather_all(self) -> Iterator[NamedTensor]:
        for name in NAMES:
            yield name, self.gather(self, name, self.version)

    def meet(self, name: str) -> None:
        """A collective."""
        self.at.append(name)
        self._meeting.wait()


def weight(name: str, version: int) -> torch.Tensor:
    return torch.arange(50.0) + NAMES.index(name) * 100 + version


def gather(rank: Rank, name: str, version: int) -> torch.Tensor:
    rank.meet(name)
    return weight(name, version)


def gather_with_delays(rank: Rank, name: str, version: int) -> torch.Tensor:
    time.sleep(random.Random(f"{rank.rank} {name} {version}").choice([0, 0, 0.001, 0.02]))
    return gather(rank, name, version)


class SlowHolder(WeightHolder):
    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        time.sleep(0.05)
        super().update_named_weights(request)


class DyingAtFirst(WeightHolder):
    """Dies at bucket 0 of version 2, once."""

    dies_at = 0

    def update_named_weights(self, request: WeightUpdateRequest) -> None:
        if (request.version, request.index) == (2, self.dies_at):
            self.dies_at = -1
            raise WorkerError("it died")
        super().update_named_weights(request)


class DyingAtLast(DyingAtFirst):
    dies_at = 2


def holders(**others: type[WeightHolder]) -> list[WeightHolder]:
    """Four engines; `_2=SlowHolder`: of another class."""
    empty = [(name, torch.zeros(50)) for name in NAMES]
    return [
        others.get(f"_{index}", WeightHolder)((name, tensor.clone()) for name, tensor in empty)
        for index in range(NUM_RANKS)
    ]


class Policy:
    """Four ranks in threads, connected to engines."""

    def __init__(self, engines: list[WeightHolder], routes: list[Route], directory: Path | str = ""):
        self.engines = engines
        meeting = threading.Barrier(NUM_RANKS, timeout=20.0)
        self.ranks = [Rank(rank, meeting, gather_with_delays) for rank in range(NUM_RANKS)]
        infos = init_infos_for(
            routes,
            [HolderInfo()] * len(engines),
            master_address="127.0.0.1",
            master_port=find_free_port(),
            directory=str(directory),
            verification="full",
        )
        self.sender = WeightSender(RanksInThreads(self.ranks), engines_in_threads(engines), infos)
        asyncio.run(self.sender.connect())

    def send(self, version: int, gather: Gather = gather_with_delays) -> SyncResult:
        async def run() -> SyncResult:
            if self.sender.is_staged:
                await self.sender.stage(version)
            return await self.sender.send(version)

        for rank in self.ranks:
            rank.version, rank.gather, rank.at = version, gather, []
        return asyncio.run(run())

    def get_error(self, version: int, gather: Gather = gather_with_delays) -> str:
        """Send, which fails. Every rank has stopped at the same bucket."""
        with pytest.raises((WeightSyncError, WorkerError, OSError)) as raised:
            self.send(version, gather)
        assert all(rank.at == self.ranks[0].at for rank in self.ranks)
        return str(raised.value)

    def check(self, version: int) -> None:
        for engine in self.engines:
            assert engine.version == version
            assert all(torch.equal(engine.parameters[name], weight(name, version)) for name in NAMES)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for engine in self.engines:
            assert engine.receiver is not None
            engine.receiver.close()


@pytest.fixture
def policy() -> Iterator[Callable[..., Policy]]:
    made: list[Policy] = []

    def make(*args: Any) -> Policy:
        made.append(Policy(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ---- all is well


@pytest.mark.parametrize(
    "routes",
    [
        OWN_RANK,
        [Route("shared_memory")] * 4,
        [Route("broadcast")] * 4,
        [*OWN_RANK[:2], Route("broadcast"), Route("broadcast")],  # two engines on a machine without a rank
    ],
    ids=["own-rank", "rank-0", "broadcast", "mixed"],
)
def test_every_engine_has_weights_despite_delays_and_slow_engine(policy, routes):
    sync = policy(holders(_2=SlowHolder), routes)
    for version in (1, 2, 3):
        metrics = sync.send(version).metrics
        assert metrics["bytes"] == 6 * 200 and metrics["buckets"] == 3
        sync.check(version)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_staged_weights_are_gathered_by_all_ranks_and_sent_by_rank_0(policy, tmp_path, encoding):
    sync = policy(holders(), [Route("checkpoint" if encoding == "full" else "shared_memory", encoding)] * 4, tmp_path)
    for version in (1, 2):
        sync.send(version)
        sync.check(version)


def test_each_engine_reads_memory_of_assigned_rank(policy, monkeypatch):
    places: dict[str, set[int]] = {}
    read = SharedMemoryReader.read

    def record(reader: SharedMemoryReader, request: WeightUpdateRequest) -> torch.Tensor:
        places.setdefault(request.location, set()).add(threading.get_ident())
        return read(reader, request)

    monkeypatch.setattr(SharedMemoryReader, "read", record)
    policy(holders(), OWN_RANK).send(1)
    assert len(places) == NUM_RANKS * 2  # slots
    assert {len(engines) for engines in places.values()} == {1}


def test_buckets_are_replanned_at_each_sync(policy):
    """Tensors that grow need other buckets and more memory than before."""
    sync = policy(holders(), OWN_RANK)

    def grown(rank: Rank, name: str, version: int) -> torch.Tensor:
        return gather(rank, name, version).repeat(version)

    for version, num_buckets in ((1, 3), (2, 6), (9, 6)):
        for engine in sync.engines:
            engine.parameters = {name: torch.zeros(50 * version) for name in NAMES}
        assert sync.send(version, grown).metrics["buckets"] == num_buckets
        for engine in sync.engines:
            assert all(torch.equal(engine.parameters[name], weight(name, version).repeat(version)) for name in NAMES)


# ---- something fails: every rank stops at the same bucket, and the next sync works


def check_next_sync(sync: Policy) -> None:
    sync.send(3)
    sync.check(3)


@pytest.mark.parametrize("route", ["own-rank", "rank-0"])
@pytest.mark.parametrize("dying, bucket", [(DyingAtFirst, "bucket 0 of version 2 (layer.0"), (DyingAtLast, "bucket 2")])
def test_crashed_engine_ends_sync_and_is_named(policy, route, dying, bucket):
    sync = policy(holders(_2=dying), OWN_RANK if route == "own-rank" else [Route("shared_memory")] * 4)
    sync.send(1)
    error = sync.get_error(2)
    assert error.startswith(f"weight sync failed at {bucket}") and "engine 2: it died" in error
    check_next_sync(sync)


def test_rank_with_failed_write_is_named_with_engines(policy, monkeypatch):
    sync = policy(holders(), OWN_RANK)
    monkeypatch.setattr(torch.Tensor, "copy_", _fail_in_thread_of(sync.ranks[2], torch.Tensor.copy_))
    own = "weight sync failed at bucket 0 of version 2 (layer.0 to layer.1): policy rank 2 could not write it for engin"
    assert sync.get_error(2).startswith(f"{own}es [2]: [Errno 28]")
    monkeypatch.undo()
    check_next_sync(sync)


def _fail_in_thread_of(rank: Rank, copy: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a copy that finds no space on the thread that gathers for a rank."""
    threads: set[int] = set()
    meet = rank.meet

    def record(name: str) -> None:
        threads.add(threading.get_ident())
        meet(name)

    def fail(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() in threads:
            raise OSError(28, "No space left on device")
        return copy(tensor, other)

    rank.meet = record  # type: ignore[method-assign]
    return fail


def test_differing_bytes_are_named_with_rank_engine_and_tensor(policy):
    def wrong_on_rank_2(rank: Rank, name: str, version: int) -> torch.Tensor:
        return gather(rank, name, version) + (rank.rank == 2 and name == "layer.3")

    sync = policy(holders(), OWN_RANK)
    error = sync.get_error(2, wrong_on_rank_2)
    assert "other weights than the trainer. engine 2 (weights of policy rank 2): 1 differ: layer.3" in error
    assert "engine 1" not in error
    check_next_sync(sync)


def test_unopenable_rank_memory_is_named_with_rank_and_engine(policy, monkeypatch):
    sync = policy(holders(), OWN_RANK)
    write = Rank.write_bucket

    def write_elsewhere(rank: Rank, *args: Any) -> Any:
        written = write(rank, *args)
        if rank.rank != 1 or written.request is None:
            return written
        return replace(written, request=replace(written.request, location="/nowhere"))  # as seen in another container

    monkeypatch.setattr(Rank, "write_bucket", write_elsewhere)
    assert "engine 1: the shared memory of policy rank 1, /nowhere, cannot be opened" in sync.get_error(2)


def test_stage_failure_ends_every_rank(policy, tmp_path):
    folder = tmp_path / "weights"
    sync = policy(holders(), [Route("checkpoint")] * 4, folder)
    folder.write_text("in the way")
    assert sync.get_error(2).startswith(f"the weights of version 2 cannot be written to {folder}")
    folder.unlink()
    sync.send(3)
    sync.check(3)


def test_bucket_is_written_before_fingerprints_of_previous_bucket(monkeypatch: pytest.MonkeyPatch):
    may_hash = threading.Event()

    def hash_later(*args: Any) -> dict[str, int]:
        assert may_hash.wait(60)
        return fingerprints_of(*args)

    monkeypatch.setattr(rank_sender, "fingerprints_of", hash_later)
    source = TensorSource(max_bucket_bytes=64)  # buckets of 16 bytes
    source.tensors = [(name, torch.full((4,), float(value))) for value, name in enumerate("abc")]
    try:
        source.connect_engines([WeightSyncInitInfo(transport="shared_memory")])
        assert [source.write_bucket(1, index, None).fingerprints for index in (0, 1)] == [{}, {}]
        may_hash.set()
        of_first, of_others = (source.write_bucket(1, index, None).fingerprints for index in (2, 3))
    finally:
        may_hash.set()
        source.close()
    assert of_first | of_others == fingerprints_of(source.tensors, 1, "sampled")
    assert list(of_first) == ["a"]
