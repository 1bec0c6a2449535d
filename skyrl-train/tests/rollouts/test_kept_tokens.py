"""Kept tokens on their way from completions to the columns of a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.generators.dialogue import ResponseTokens
from skyrl_train.kept_tokens import KeptTokens
from skyrl_train.rollouts.adapter import to_generator_output, to_rollout_batch
from skyrl_train.rollouts.collate import collate, compute_kept_token_metrics
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.joining import join_samples
from skyrl_train.rollouts.journal import RolloutJournal
from skyrl_train.rollouts.schedule import ScheduleState
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID
from skyrl_train_testing.tiny_models import build_character_tokenizer


def kept(*sets: list[int]) -> KeptTokens:
    return KeptTokens.of([np.array(each, np.int32) for each in sets])


def sample(prompt: list[int], response: list[int], mask: list[int], kept: KeptTokens | None) -> TrainingSample:
    return TrainingSample(prompt, response, mask, [0.0] * len(response), kept_tokens=kept)


def batch_of(*samples: TrainingSample) -> RolloutBatch:
    trajectories = [Trajectory(TrajectoryID("a", n), [each], "stop") for n, each in enumerate(samples)]
    return RolloutBatch([TrajectoryGroup("a", trajectories)])


def test_kept_tokens_are_in_response_rows():
    batch = batch_of(
        sample([5, 6, 7], [8, 9, 3], [1, 0, 1], kept([8, 4], [], [3, 9, 30])),
        sample([5], [6, 7], [1, 1], kept([6], [7])),
        sample([5], [6], [0], None),  # failed: nothing of it trains
    )
    columns = collate(batch, build_character_tokenizer(), 1, with_kept_tokens=True)
    assert columns.tensor("kept_counts").tolist() == [[2, 0, 3], [1, 1, 0], [0, 0, 0]]
    assert columns.tensor("kept_ids").tolist() == [[8, 4, 3, 9, 30], [6, 7, 0, 0, 0], [0] * 5]
    assert compute_kept_token_metrics(columns) == {"generate/kept_tokens_mean": 7 / 4, "generate/kept_tokens_max": 3}
    without = collate(batch, build_character_tokenizer(), 1)
    assert "kept_ids" not in without and compute_kept_token_metrics(without) == {}


@pytest.mark.parametrize(
    "own, message",
    [
        (None, "has kept tokens of 0 of its 3 response tokens"),
        (kept([8], [9]), "has kept tokens of 2 of its 3 response tokens"),
        (kept([8], [9, 10], []), "trains token 2 of its response, whose kept tokens are unknown"),
        (
            kept([9, 10], [3], [8]),
            "has token 8 at position 0 of its response",
        ),  # shifted
        (kept([8, 4], [3, 9], [5, 6]), "has token 3 at position 2 of its response"),
    ],
)
def test_token_outside_kept_tokens_raises(own: KeptTokens | None, message: str):
    batch = batch_of(sample([5, 6, 7], [8, 9, 3], [1, 1, 1], own))
    with pytest.raises(ValueError, match=f"sampling_mask_replay=true: a sample of prompt 'a' {message}"):
        collate(batch, build_character_tokenizer(), 1, with_kept_tokens=True)


def test_kept_tokens_are_extended_and_truncated_with_response():
    response = ResponseTokens()
    response.append_generated([8, 9], [0.0, 0.0], [1, 1], kept([8, 4], [9]))
    response.append_context([5, 5])
    response.append_generated([3], None, [1], kept([3, 2, 1]))
    assert response.kept == kept([8, 4], [9], [], [], [3, 2, 1])
    response.truncate(3)
    assert response.to_sample([1], []).kept_tokens == kept([8, 4], [9], [])
    response.truncate(0)
    assert response.to_sample([1], []).kept_tokens is None


def test_joined_turns_have_no_kept_tokens_between_turns():
    first = sample([1, 2], [3, 4], [1, 1], kept([3], [4, 5]))
    second = sample([1, 2, 3, 4, 5], [6], [1], kept([6, 7]))
    assert join_samples([first, second]).kept_tokens == kept([3], [4, 5], [], [6, 7])
    assert join_samples([first, sample([1, 2, 3, 4, 5], [6], [1], None)]).kept_tokens is None


def test_generator_columns_and_journal_keep_kept_tokens(tmp_path: Path):
    batch = batch_of(sample([5], [6, 7], [1, 1], kept([6, 300_000], [7])), sample([5], [6], [0], None))
    output = to_generator_output(batch)
    assert output.get("kept_tokens") == [kept([6, 300_000], [7]), None]
    again = to_rollout_batch(output, [each.id for each in batch.trajectories])
    assert [each.kept_tokens for *_, each in again.rows()] == [kept([6, 300_000], [7]), None]
    [group] = batch.groups
    journal = RolloutJournal(tmp_path / "journal.jsonl", {"seed": 1})
    journal.append_finished(FinishedGroup(ticket=0, group=group, metrics={}, version=3, seconds=1.0))
    journal.close()
    state: Any = ScheduleState()
    recovered = RolloutJournal(tmp_path / "journal.jsonl", {"seed": 1}).recover(state)
    assert recovered.groups[0].group == group
    with pytest.raises(ValueError, match="counts and ids"):
        KeptTokens.from_json([1, 2])
