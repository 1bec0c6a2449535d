"""Forward-only passes that begin before all groups of a step are finished."""

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from skyrl_train.batch_preparation import mini_batches_of_prompts
from skyrl_train.errors import WorkerError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.orchestration.early_forwards import Divide, EarlyForwards, ForwardPass, lengths_of
from skyrl_train.orchestration.inline_launcher import InlineRank
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.rollouts.collate import collate
from skyrl_train.rollouts.filters import set_uid
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID
from skyrl_train.training_backends.base import ParallelInfo
from skyrl_train.training_batch import TrainingInputBatch, TrainingOutputBatch

PROMPTS, SAMPLES = 8, 3


class SummingRanks:
    """Two ranks whose output at each response token is the sum of the tokens of its micro-batch, plus the token."""

    num_ranks = 2

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.computed: list[list[int]] = []
        """Micro-batches of each rank, for each call."""

    async def call(self, calls: Sequence[Any], timeout_seconds: float, timeout_setting: str) -> list[list[Any]]:
        await asyncio.sleep(0.001)
        if self.error is not None:
            raise self.error
        self.computed.append([sum(not micro.is_dummy for micro in args[1]) for [(_, args)] in calls])
        assert len({len(args[1]) for [(_, args)] in calls}) == 1, "ranks meet in every forward"
        return [[self._forward(*args)] for [(_, args)] in calls]

    def _forward(self, batch: TrainingInputBatch, micro_batches: Sequence[Any]) -> TrainingOutputBatch:
        tokens = batch.tensor("sequences") * batch.tensor("attention_mask")
        response = tokens[:, -batch.metadata["response_length"] :]
        output = torch.zeros(response.shape)
        for micro in micro_batches:
            rows = list(micro.rows)
            if not micro.is_dummy:
                output[rows] = torch.where(response[rows] != 0, tokens[rows].sum() + response[rows], 0).float()
        return TrainingOutputBatch(output=output)

    async def shutdown(self) -> None: ...

    def kill(self) -> None: ...


class Padding:
    pad_token_id = 0


def collated(batch: RolloutBatch) -> TrainingInputBatch:
    return collate(batch, Padding(), 1)  # type: ignore[arg-type]  # of a tokenizer it takes no more


def groups_of_different_lengths(seed: int = 0) -> list[TrajectoryGroup]:
    draw = random.Random(seed)

    def sample() -> TrainingSample:
        prompt, response = ([draw.randint(1, 999) for _ in range(draw.randint(1, 20))] for _ in range(2))
        return TrainingSample(prompt, response, [1] * len(response), [0.0] * len(response))

    return [
        TrajectoryGroup(str(place), [Trajectory(TrajectoryID(str(place), n), [sample()]) for n in range(SAMPLES)])
        for place in range(PROMPTS)
    ]


def pass_of(ranks: SummingRanks, max_tokens: int | None) -> tuple[ForwardPass, Divide]:
    """The pass of a model on these ranks, with mini-batches of four prompts."""

    def divide(group: ActorGroup, batch: TrainingInputBatch) -> Schedule:
        mini_batches = mini_batches_of_prompts(batch.metadata["uids"], 4)
        return Schedule.of(lengths_of(batch), mini_batches, 2, micro_batch_size=2, max_tokens=max_tokens)

    group = ActorGroup("ref", ranks, device="cpu", timeout_seconds=10)
    group.parallel = [ParallelInfo(rank=rank, world_size=2) for rank in range(2)]
    rows_each = SAMPLES if max_tokens is None else None
    return ForwardPass(group, divide, collated, num_prompts=PROMPTS, prompts_each=4, rows_each=rows_each), divide


async def outputs_of(
    ranks: SummingRanks,
    batch: list[TrajectoryGroup],
    finished: list[dict[int, TrajectoryGroup]],
    max_tokens: int | None,
) -> torch.Tensor:
    """Outputs for a batch, before which these groups were finished, one after the other."""
    early, divide = pass_of(ranks, max_tokens)
    forwards = EarlyForwards([early])
    async with forwards.running():
        for groups in finished:
            forwards.offer(groups)
            await asyncio.sleep(0.003)
    whole = collated(RolloutBatch([set_uid(each, str(place)) for place, each in enumerate(batch)]))
    return await forwards.finish(early.group, divide(early.group, whole), whole)


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_early_passes_compute_each_micro_batch_once_with_equal_results(max_tokens: int | None):
    groups = groups_of_different_lengths()
    whole, early = SummingRanks(), SummingRanks()
    expected = asyncio.run(outputs_of(whole, groups, [], max_tokens))
    order = random.Random(1).sample(range(PROMPTS), PROMPTS - 1)
    finished = [{place: groups[place] for place in order[:number]} for number in range(1, PROMPTS)]
    assert torch.equal(asyncio.run(outputs_of(early, groups, finished, max_tokens)), expected)
    assert len(whole.computed) == 1 and len(early.computed) > 1
    assert sum(map(sum, early.computed)) == sum(whole.computed[0])


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_unpredicted_groups_are_recomputed(max_tokens: int | None):
    groups, others = groups_of_different_lengths(), groups_of_different_lengths(seed=1)
    batch = [*groups[:4], others[4], *groups[5:7]]  # one group has other tokens, and one is missing
    late, early = SummingRanks(), SummingRanks()
    expected = asyncio.run(outputs_of(late, batch, [], max_tokens))
    assert torch.equal(asyncio.run(outputs_of(early, batch, [dict(enumerate(groups))], max_tokens)), expected)
    assert 0 < sum(early.computed[-1]) < sum(late.computed[-1]), "the first mini-batch was foreseen, the second not"


def test_forward_error_cancels_generation():
    error = WorkerError("ref worker 1 raised ValueError: my bug")
    early, _ = pass_of(SummingRanks(error), None)

    async def run() -> None:
        async with EarlyForwards([early]).running():
            early.offer(dict(enumerate(groups_of_different_lengths())))
            await asyncio.sleep(60)

    with pytest.raises(WorkerError) as raised:
        asyncio.run(asyncio.wait_for(run(), 5))
    assert raised.value is error


@pytest.mark.parametrize("has_passes", [True, False])
def test_generation_error_keeps_cause(has_passes: bool):
    cause = KeyError("table")

    async def run() -> None:
        async with EarlyForwards([pass_of(SummingRanks(), None)[0]] if has_passes else []).running():
            raise RuntimeError("my filter failed") from cause

    with pytest.raises(RuntimeError) as raised:
        asyncio.run(run())
    assert raised.value.__cause__ is cause


def test_waiting_call_does_not_start_after_generation_error():
    began, may_end = threading.Event(), threading.Event()
    computed: list[str] = []

    class Worker:
        def __init__(self, name: str):
            self.name = name

        def forward(self, batch: TrainingInputBatch, micro_batches: Sequence[Any]) -> TrainingOutputBatch:
            computed.append(self.name)
            began.set()
            assert may_end.wait(10)
            return TrainingOutputBatch(output=torch.zeros(len(batch), batch.metadata["response_length"]))

        def teardown(self) -> None: ...

    def pass_in_this_process(name: str) -> ForwardPass:
        group = ActorGroup(name, InlineRank(name, Worker, (name,), "cpu"), device="cpu", timeout_seconds=10)
        group.parallel = [ParallelInfo(rank=0, world_size=1)]

        def divide(group: ActorGroup, batch: TrainingInputBatch) -> Schedule:
            return Schedule.of(
                lengths_of(batch), mini_batches_of_prompts(batch.metadata["uids"], 4), 1, micro_batch_size=2
            )

        return ForwardPass(group, divide, collated, num_prompts=PROMPTS, prompts_each=4, rows_each=SAMPLES)

    async def run() -> None:
        passes = [pass_in_this_process(name) for name in ("ref", "critic")]
        early = EarlyForwards(passes)
        try:
            with pytest.raises(RuntimeError, match="engine died"):
                async with early.running():
                    early.offer(dict(enumerate(groups_of_different_lengths())))
                    await asyncio.to_thread(began.wait, 10)
                    raise RuntimeError("engine died")
            await asyncio.sleep(0)  # as the run's end, which waits for more
        finally:
            may_end.set()
            await asyncio.gather(*(each.group.shutdown() for each in passes))

    asyncio.run(run())
    assert computed == ["ref"]
