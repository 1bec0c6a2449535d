"""Policy ranks gather together and hand their part to their own engines, or all stop at the same bucket."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import WorkerError
from skyrl_train.weight_sync.base import WeightUpdateRequest, WeightUpdates
from skyrl_train.weight_sync.lockstep import PolicyRanks
from skyrl_train.weight_sync.payload import NamedTensor
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.rank_part import RankPart
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.weight_sync.shared_memory import SharedMemoryReader
from skyrl_train_testing.weight_holders import (
    CPU,
    HolderInfo,
    HoldersInThreads,
    RankInThread,
    RanksInThreads,
    WeightHolder,
)

NUM_RANKS = 4
NAMES = [f"layer.{i}" for i in range(6)]
OWN_RANK = [Route("shared_memory", sources=(rank,)) for rank in range(NUM_RANKS)]
Gather = Callable[[RankInThread, str, int], torch.Tensor]


def weight(name: str, version: int) -> torch.Tensor:
    return torch.arange(50.0) + NAMES.index(name) * 100 + version


def gather(rank: RankInThread, name: str, version: int) -> torch.Tensor:
    """A collective, in which all ranks must be at the same parameter, and in no other collective."""
    assert rank.all_gather(("gather", name)) == [("gather", name)] * NUM_RANKS
    return weight(name, version)


def gather_with_delays(rank: RankInThread, name: str, version: int) -> torch.Tensor:
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


class FailingHandles(HoldersInThreads):
    """The call of bucket 1 of version 2 cannot be made, once."""

    has_failed = False

    def call_each(self, method: Callable[..., object], args: Sequence[Any]) -> list[Any]:
        if (
            method is WeightUpdates.update_named_weights
            and not self.has_failed
            and (args[0].version, args[0].index) == (2, 1)
        ):
            self.has_failed = True
            raise ConnectionError("no connection")
        return super().call_each(method, args)


def holders(**others: type[WeightHolder]) -> list[WeightHolder]:
    """Four engines; `_2=SlowHolder`: of another class."""
    empty = [(name, torch.zeros(50)) for name in NAMES]
    return [
        others.get(f"_{index}", WeightHolder)((name, tensor.clone()) for name, tensor in empty)
        for index in range(NUM_RANKS)
    ]


class Policy:
    """Four ranks in threads, connected to engines. A bucket has two parameters."""

    handles_type = HoldersInThreads

    def __init__(self, engines: list[WeightHolder], routes: list[Route], directory: Path | str = ""):
        self.engines = engines
        self.handles = self.handles_type(engines)
        self.infos = init_infos_for(
            routes,
            [HolderInfo()] * len(engines),
            master_address="127.0.0.1",
            master_port=find_free_port(),
            directory=str(directory),
            verification="full",
        )
        self._ranks = RanksInThreads(NUM_RANKS)
        self.ends = self._ranks.run(self._connect)

    def _connect(self, rank: RankInThread) -> WeightSender | RankPart:
        if rank.rank:
            return RankPart(self.infos, CPU, rank, max_bucket_bytes=4 * 400)
        return WeightSender(self.handles, self.infos, CPU, rank, max_bucket_bytes=4 * 400, verification="full")

    def send(self, version: int, gather: Gather = gather_with_delays, staged: bool = False) -> list[Any]:
        """Return what each rank returned or raised."""

        def call(rank: RankInThread) -> Any:
            end = self.ends[rank.rank]
            if staged:
                end.stage(self._gathered(rank, version, gather), version)
            return end.send(None if staged else self._gathered(rank, version, gather), version)

        return self._ranks.run(call)

    def _gathered(self, rank: RankInThread, version: int, gather: Gather) -> Iterator[NamedTensor]:
        for name in NAMES:
            yield name, gather(rank, name, version)

    def check(self, version: int) -> None:
        for engine in self.engines:
            assert engine.version == version
            assert all(torch.equal(engine.parameters[name], weight(name, version)) for name in NAMES)

    def close(self) -> None:
        for each in [*self.ends, *(engine.receiver for engine in self.engines)]:
            each.close()


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
        first, *others = sync.send(version)
        assert first.metrics["bytes"] == 6 * 200 and first.metrics["buckets"] == 3
        assert [(other.metrics, other.reports) for other in others] == [({}, [])] * 3
        sync.check(version)


@pytest.mark.parametrize("encoding", ["full", "delta"])
def test_staged_weights_are_gathered_by_all_ranks_and_sent_by_rank_0(policy, tmp_path, encoding):
    sync = policy(holders(), [Route("checkpoint" if encoding == "full" else "shared_memory", encoding)] * 4, tmp_path)
    for version in (1, 2):
        sync.send(version, staged=True)
        sync.check(version)


def test_each_engine_reads_memory_of_assigned_rank(policy, monkeypatch):
    places: dict[str, set[int]] = {}
    read = SharedMemoryReader.read

    def noting(reader: SharedMemoryReader, request: WeightUpdateRequest) -> torch.Tensor:
        places.setdefault(request.location, set()).add(threading.get_ident())
        return read(reader, request)

    monkeypatch.setattr(SharedMemoryReader, "read", noting)
    policy(holders(), OWN_RANK).send(1)
    assert len(places) == NUM_RANKS * 2  # slots
    assert {len(engines) for engines in places.values()} == {1}


def test_rank_without_engines_writes_no_memory(policy):
    sync = policy(holders()[:1], [Route("shared_memory", sources=(3,))])
    written = [rank for rank, end in enumerate(sync.ends) if end._writer._writers]
    sync.send(1)
    sync.check(1)
    assert written == [3]


def test_buckets_are_replanned_at_each_sync(policy):
    """Tensors that grow need other buckets and more memory than before."""
    sync = policy(holders(), OWN_RANK)

    def grown(rank: RankInThread, name: str, version: int) -> torch.Tensor:
        return gather(rank, name, version).repeat(version)

    for version, num_buckets in ((1, 3), (2, 6), (9, 6)):
        for engine in sync.engines:
            engine.parameters = {name: torch.zeros(50 * version) for name in NAMES}
        first, *_ = sync.send(version, grown)
        assert first.metrics["buckets"] == num_buckets
        for engine in sync.engines:
            assert all(torch.equal(engine.parameters[name], weight(name, version).repeat(version)) for name in NAMES)


# ---- something fails: every rank ends, at the same bucket, and the next sync works


def check_next_sync(sync: Policy) -> None:
    sync.send(3)
    sync.check(3)


@pytest.mark.parametrize("route", ["own-rank", "rank-0"])
def test_crashed_engine_ends_sync_on_every_rank_and_is_named(policy, route):
    sync = policy(holders(_2=DyingAtFirst), OWN_RANK if route == "own-rank" else [Route("shared_memory")] * 4)
    sync.send(1)
    first, *others = [str(error) for error in sync.send(2)]
    assert first == "weight sync failed at bucket 0 of version 2 (layer.0 to layer.1): engine 2: it died"
    assert others == [f"policy rank 0 failed: {first}"] * 3
    check_next_sync(sync)


def test_engine_crash_at_last_bucket_ends_sync_on_waiting_rank(policy):
    sync = policy(holders(_2=DyingAtLast), OWN_RANK)
    first, *others = sync.send(2)
    assert "at bucket 2 of version 2" in str(first) and not any(isinstance(other, Exception) for other in others)
    check_next_sync(sync)


def test_failed_call_is_reported_to_other_ranks_in_next_gather(policy, monkeypatch):
    monkeypatch.setattr(Policy, "handles_type", FailingHandles)
    sync = policy(holders(), OWN_RANK)
    first, *others = sync.send(2)
    assert isinstance(first, ConnectionError)
    assert [str(other) for other in others] == ["policy rank 0 failed: no connection"] * 3
    check_next_sync(sync)


def test_rank_with_failed_write_is_named_with_engines(policy):
    sync = policy(holders(), OWN_RANK)
    sync.ends[2]._writer.close()  # its memory is gone
    errors = [str(error) for error in sync.send(2)]
    own = "weight sync failed at bucket 0 of version 2 (layer.0 to layer.1): policy rank 2 could not write it for engin"
    assert errors[2].startswith(f"{own}es [2]: [Errno 9]")
    assert errors[:2] + errors[3:] == [f"policy rank 2 failed: {errors[2]}"] * 3


def test_differing_bytes_are_named_with_rank_engine_and_tensor(policy):
    def wrong_on_rank_2(rank: RankInThread, name: str, version: int) -> torch.Tensor:
        return gather(rank, name, version) + (rank.rank == 2 and name == "layer.3")

    sync = policy(holders(), OWN_RANK)
    first, *_ = sync.send(2, wrong_on_rank_2)
    assert "other weights than the trainer. engine 2 (weights of policy rank 2): 1 differ: layer.3" in str(first)
    assert "engine 1" not in str(first)
    check_next_sync(sync)


def test_unopenable_rank_memory_is_named_with_rank_and_engine(policy):
    sync = policy(holders(), OWN_RANK)
    [writer] = sync.ends[1]._writer._writers
    for slot in writer._slots:
        slot.name = "/nowhere"  # as seen from another container
    first, *_ = sync.send(2)
    assert "engine 1: the shared memory of policy rank 1, /nowhere, cannot be opened" in str(first)


def test_stage_failure_before_first_bucket_ends_every_rank(policy, tmp_path):
    folder = tmp_path / "weights"
    sync = policy(holders(), [Route("checkpoint")] * 4, folder)
    folder.write_text("in the way")
    first, *others = [str(error) for error in sync.send(2, staged=True)]
    assert first.startswith(f"the weights of version 2 cannot be written to {folder}")
    assert others == [f"policy rank 0 failed: {first}"] * 3
    folder.unlink()
    sync.send(3, staged=True)
    sync.check(3)


def test_single_rank_all_gather_returns_own_value():
    assert PolicyRanks().all_gather("own") == ["own"]
