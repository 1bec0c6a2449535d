"""An actor group sends rows to data-parallel ranks and takes answers from the ranks that hold outputs."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.launcher import Calls
from skyrl_train.training_backends.base import ParallelInfo, RankInfo


class PipelineRank:
    """A rank of a backend whose replicas are two pipeline stages, of which the second has outputs."""

    def rendezvous_point(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def init_model(self, info: RankInfo) -> ParallelInfo:
        self.rank = info.rank
        is_last_stage = info.rank % 2 == 1
        return ParallelInfo(
            rank=info.rank, world_size=info.world_size, ranks_per_replica=2, holds_outputs=is_last_stage
        )

    def answer(self, rows: str) -> tuple[int, str]:
        return self.rank, rows


class InProcessRanks:
    """Ranks as objects of this process."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self._workers = [PipelineRank() for _ in range(num_ranks)]

    async def call(self, calls: Sequence[Calls], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        pairs = zip(self._workers, calls, strict=True)
        return [[getattr(worker, method)(*args) for method, args in own] for worker, own in pairs]

    async def shutdown(self) -> None: ...

    def kill(self) -> None: ...


def test_rows_reach_all_stages_and_results_are_from_last_stage():
    async def answers() -> list[Any]:
        group = ActorGroup("policy", InProcessRanks(4), device="cpu", timeout_seconds=10)
        await group.init_model()
        assert (group.data_parallel_size, group.token_budget(100)) == (2, 200)
        assert await group.call_all(PipelineRank.answer, "same") == [(rank, "same") for rank in range(4)]
        return await group.call_data_parallel(PipelineRank.answer, [("first half",), ("second half",)])

    assert asyncio.run(answers()) == [(1, "first half"), (3, "second half")]


async def test_reservation_delays_calls_of_other_tasks_only():
    group = ActorGroup("policy", InProcessRanks(2), device="cpu", timeout_seconds=10)
    order: list[str] = []

    async def call(name: str) -> None:
        await group.call_all(PipelineRank.answer, name)
        order.append(name)

    async def reserve(name: str) -> None:
        async with group.reserve():
            for part in ("first", "second"):
                await asyncio.gather(call(f"{name} {part}"))  # from a task of its own
                await asyncio.sleep(0)

    await group.init_model()
    async with asyncio.TaskGroup() as tasks:
        for name in ("a", "b"):
            tasks.create_task(reserve(name))
        tasks.create_task(call("other"))
    assert order == ["a first", "a second", "b first", "b second", "other"]


async def test_failed_reservation_ends():
    group = ActorGroup("policy", InProcessRanks(2), device="cpu", timeout_seconds=10)
    await group.init_model()
    with pytest.raises(ZeroDivisionError):
        async with group.reserve():
            raise ZeroDivisionError
    await group.call_all(PipelineRank.answer, "later")
