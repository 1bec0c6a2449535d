"""Batches of prompts are sampled until one is full of prompts that teach something."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from skyrl_train.config import DynamicSamplingConfig
from skyrl_train.dataset.dynamic_sampling import Sampled, sample_batch, scores_of, told_apart
from skyrl_train.errors import SkyRLError
from skyrl_train.generators.base import Failure, GeneratorOutput, TrajectoryID

Groups = Mapping[str, Sequence[float | None]]
"""Rewards of the answers to each prompt; None for one that failed."""

FAILED = Failure("environment", "the sandbox hung up")


def output_of(groups: Groups) -> Sampled:
    """Trajectories of these prompts with these rewards; None for one that failed. The response of each tells which
    prompt and sample it is, as `[prompt's number, sample's number]`."""
    samples = [(uid, number, reward) for uid, rewards in groups.items() for number, reward in enumerate(rewards)]
    output = GeneratorOutput(
        prompt_token_ids=[[1]] * len(samples),
        response_ids=[[ord(uid[0]), number] for uid, number, _ in samples],
        rewards=[0.0 if reward is None else reward for _, _, reward in samples],
        loss_masks=[[1, 1]] * len(samples),
        stop_reasons=["stop"] * len(samples),
        rollout_metrics={"generate/num_failed/environment": float(sum(r is None for _, _, r in samples))},
        rollout_logprobs=[[-1.0, -1.0]] * len(samples),
        trajectory_ids=[TrajectoryID(uid, number) for uid, number, _ in samples],
        failures=[FAILED if reward is None else None for _, _, reward in samples],
    )
    return output, [uid for uid, _, _ in samples]


def run(batches: Sequence[Groups], num_prompts: int, seed: int = 0, **settings: Any) -> Any:
    """What `sample_batch` makes of these batches, one after the other; the last one comes again and again."""

    async def ask(num_before: int) -> Sampled:
        return output_of(batches[min(num_before, len(batches) - 1)])

    dice = torch.Generator().manual_seed(seed)
    return asyncio.run(sample_batch(ask, DynamicSamplingConfig(**settings), num_prompts, dice))


def test_without_it_a_batch_is_what_was_sampled():
    output, uids, metrics = run([{"a": [1, 1], "b": [0, 1]}], 2)
    assert uids == ["a", "a", "b", "b"] and len(output["response_ids"]) == 4 and metrics == {}


def test_filter_collects_informative_prompts_until_the_batch_is_full():
    batches = [{"a": [1, 1], "b": [0, 1]}, {"c": [0, 0], "d": [1, 1]}, {"e": [1, 0], "f": [0, 1]}]
    output, uids, metrics = run(batches, 2, type="filter")
    assert uids == ["b", "b", "e", "e"]  # f differs, too, and is one too many
    assert output["response_ids"] == [[98, 0], [98, 1], [101, 0], [101, 1]]
    assert output["rewards"] == [0, 1, 1, 0]
    assert metrics["generate/num_sampled_batches"] == 3
    assert metrics["generate/num_sampled_prompts"] == 6
    assert metrics["generate/informative_share"] == 0.5
    assert metrics["generate/num_unused_prompts"] == 1
    assert metrics["reward/avg_raw_reward_of_all_sampled"] == pytest.approx((0.75 + 0.5 + 0.5) / 3)


def test_two_batches_in_a_row_with_nothing_left_are_no_crash():
    nothing: Groups = {"a": [1, 1], "b": [None, None]}
    _, uids, metrics = run([nothing, nothing, {"c": [0, 1], "d": [1, 0]}], 2, type="filter")
    assert uids == ["c", "c", "d", "d"]
    assert metrics["generate/num_failed/environment"] == 4, "failures are counted over all that was sampled"


@pytest.mark.parametrize("kind, also", [("filter", "train_batch_size"), ("replace", "min_replace_ratio")])
def test_the_limit_ends_the_run_with_what_was_tried_and_what_to_change(kind: Any, also: str):
    expected = (
        rf"dynamic_sampling.type={kind} did not fill a batch of 4 prompts: 3 batches .*max_sample_batches=3\) of 12 "
        rf"prompts in all gave 3 whose answers differ.* raise generator.n_samples_per_prompt.*{also}"
    )
    with pytest.raises(SkyRLError, match=expected):
        run([{"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [0, 0]}], 4, type=kind, max_sample_batches=3)


def test_replace_puts_copies_of_good_groups_in_the_places_of_the_others():
    output, uids, metrics = run([{"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [1, 0]}], 4, type="replace")
    assert uids == ["a", "a", "b", "b", "c", "c", "d", "d"], "each a group of its own"
    copied = [output["response_ids"][row][0] for row in (0, 2, 4, 6)]
    assert copied[1] == ord("b") and copied[3] == ord("d")
    assert {copied[0], copied[2]} <= {ord("b"), ord("d")}
    ids = output.get("trajectory_ids")
    assert ids is not None and [trajectory_id.instance_id for trajectory_id in ids] == uids
    assert metrics["generate/informative_share"] == 0.5
    again, _, _ = run([{"a": [1, 1], "b": [0, 1], "c": [0, 0], "d": [1, 0]}], 4, type="replace")
    assert again["response_ids"] == output["response_ids"], "drawn by the step's own dice"


def test_replace_samples_anew_where_too_few_are_good_and_keeps_nothing_of_it():
    batches = [{"a": [1, 1], "b": [0, 1], "c": [0, 0]}, {"d": [0, 1], "e": [1, 0], "f": [1, 1]}]
    output, uids, metrics = run(batches, 3, type="replace", min_replace_ratio=0.5)
    assert uids == ["d", "d", "e", "e", "f", "f"]
    assert {ids[0] for ids in output["response_ids"]} == {ord("d"), ord("e")}
    assert (metrics["generate/num_sampled_batches"], metrics["generate/num_unused_prompts"]) == (2, 1)


def test_a_group_with_failures_is_judged_by_its_others():
    output, uids = output_of({"a": [None, 1, 1], "b": [None, 0, 1], "c": [None, None, 1], "d": [None, None, None]})
    assert scores_of(output, uids) == [None, 1, 1, None, 0, 1, None, None, None, None, None, None]
    _, kept, _ = run([{"a": [None, 1, 1], "b": [None, 0, 1], "c": [None, None, 1]}], 1, type="filter")
    assert kept == ["b", "b", "b"]


def test_a_prompt_that_comes_again_within_a_step_is_another_group():
    seen: set[str] = set()
    rows = [{"uid": "a", "prompt": 1}, {"uid": "b", "prompt": 2}]
    assert told_apart(rows, seen) == rows
    assert [row["uid"] for row in told_apart(rows, seen)] == ["a#2", "b#2"]
    assert [row["uid"] for row in told_apart(rows, seen)] == ["a#3", "b#3"]
