"""Batches of prompts are sampled until one is full of prompts that teach something."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from skyrl_train.config import DynamicSamplingConfig
from skyrl_train.errors import SkyRLError
from skyrl_train.rollouts.dynamic_sampling import make_uids_unique, sample_batch
from skyrl_train.rollouts.filters import get_scores
from skyrl_train.rollouts.types import Failure, RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID

Groups = Mapping[str, Sequence[float | None]]
"""Rewards of the answers to each prompt; None for one that failed."""

FAILED = Failure("environment", "the sandbox hung up")


def batch_of(groups: Groups) -> RolloutBatch:
    """Trajectories of these prompts with these rewards; None for one that failed. The response of each tells which
    prompt and sample it is, as `[prompt's number, sample's number]`."""

    def trajectory(uid: str, number: int, reward: float | None) -> Trajectory:
        sample = TrainingSample([1], [ord(uid[0]), number], [1, 1], [0.0, reward or 0.0], [-1.0, -1.0])
        return Trajectory(TrajectoryID(uid, number), [sample], "stop", FAILED if reward is None else None)

    num_failed = sum(reward is None for rewards in groups.values() for reward in rewards)
    return RolloutBatch(
        [
            TrajectoryGroup(uid, [trajectory(uid, number, reward) for number, reward in enumerate(rewards)])
            for uid, rewards in groups.items()
        ],
        {"generate/num_failed/environment": float(num_failed)},
    )


def run(batches: Sequence[Groups], num_prompts: int, seed: int = 0, **settings: Any) -> RolloutBatch:
    """Return what `sample_batch` makes of these batches, one after the other; the last one comes again and again."""

    async def request(num_before: int) -> RolloutBatch:
        return batch_of(batches[min(num_before, len(batches) - 1)])

    generator = torch.Generator().manual_seed(seed)
    return asyncio.run(sample_batch(request, DynamicSamplingConfig(**settings), num_prompts, generator))


def uids_of(batch: RolloutBatch) -> list[str]:
    return [group.uid for group in batch.groups]


def responses_of(batch: RolloutBatch) -> list[list[int]]:
    return [sample.response_ids for _, _, sample in batch.rows()]


def test_filter_collects_informative_prompts_until_batch_is_full():
    batches = [{"a": [1, 1], "b": [0, 1]}, {"c": [0, 0], "d": [1, 1]}, {"e": [1, 0], "f": [0, 1]}]
    batch = run(batches, 2, type="filter")
    assert uids_of(batch) == ["b", "e"]  # f differs, too, and is one too many
    assert responses_of(batch) == [[98, 0], [98, 1], [101, 0], [101, 1]]
    assert [trajectory.reward for trajectory in batch.trajectories] == [0, 1, 1, 0]
    assert batch.metrics["generate/num_sampled_batches"] == 3
    assert batch.metrics["generate/num_sampled_prompts"] == 6
    assert batch.metrics["generate/informative_share"] == 0.5
    assert batch.metrics["generate/num_unused_prompts"] == 1
    assert batch.metrics["generate/avg_num_tokens"] == 2
    assert batch.metrics["reward/avg_raw_reward_of_all_sampled"] == pytest.approx((0.75 + 0.5 + 0.5) / 3)


def test_filter_continues_after_two_empty_batches():
    nothing: Groups = {"a": [1, 1], "b": [None, None]}
    batch = run([nothing, nothing, {"c": [0, 1], "d": [1, 0]}], 2, type="filter")
    assert uids_of(batch) == ["c", "d"]
    assert batch.metrics["generate/num_failed/environment"] == 4, "failures are counted over all that was sampled"


@pytest.mark.parametrize("kind, also", [("filter", "train_batch_size"), ("replace", "min_replace_ratio")])
def test_sample_limit_error_reports_attempts_and_settings(kind: Any, also: str):
    expected = (
        rf"dynamic_sampling.type={kind} did not fill a batch of 4 prompts: 3 batches .*max_sample_batches=3\) of 12 "
        rf"prompts in total gave 3 whose responses differ.* raise generator.n_samples_per_prompt.*{also}"
    )
    with pytest.raises(SkyRLError, match=expected):
        run([{"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [0, 0]}], 4, type=kind, max_sample_batches=3)


def test_replace_copies_informative_groups_over_others():
    batch = run([{"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [1, 0]}], 4, type="replace")
    assert uids_of(batch) == ["a", "b", "c", "d"], "each a group of its own"
    copied = [responses_of(batch)[row][0] for row in (0, 2, 4, 6)]
    assert copied[1] == ord("b") and copied[3] == ord("d")
    assert {copied[0], copied[2]} <= {ord("b"), ord("d")}
    assert [trajectory.id.to_string() for trajectory in batch.trajectories] == [
        f"{u}_{k}" for u in "abcd" for k in "01"
    ]
    assert batch.metrics["generate/informative_share"] == 0.5
    again = run([{"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [1, 0]}], 4, type="replace")
    assert again == batch, "drawn by the step's own generator"


def test_replace_resamples_batch_when_too_few_groups_are_informative():
    batches = [{"a": [1, 1], "b": [0, 1], "c": [0, 0]}, {"d": [0, 1], "e": [1, 0], "f": [1, 1]}]
    batch = run(batches, 3, type="replace", min_replace_ratio=0.5)
    assert uids_of(batch) == ["d", "e", "f"]
    assert {ids[0] for ids in responses_of(batch)} == {ord("d"), ord("e")}
    metrics = batch.metrics
    assert (metrics["generate/num_sampled_batches"], metrics["generate/num_unused_prompts"]) == (2, 1)


def test_group_with_failures_is_scored_by_successful_samples():
    batch = batch_of({"a": [None, 1, 1], "b": [None, 0, 1], "c": [None, None, 1], "d": [None, None, None]})
    assert [get_scores(group) for group in batch.groups] == [[None, 1, 1], [None, 0, 1], [None] * 3, [None] * 3]
    kept = run([{"a": [None, 1, 1], "b": [None, 0, 1], "c": [None, None, 1]}], 1, type="filter")
    assert uids_of(kept) == ["b"]


def test_repeated_prompt_within_step_gets_unique_uid():
    seen: set[str] = set()
    rows = [{"uid": "a", "prompt": 1}, {"uid": "b", "prompt": 2}]
    assert make_uids_unique(rows, seen) == rows
    assert [row["uid"] for row in make_uids_unique(rows, seen)] == ["a#2", "b#2"]
    assert [row["uid"] for row in make_uids_unique(rows, seen)] == ["a#3", "b#3"]
