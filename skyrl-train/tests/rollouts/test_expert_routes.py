"""Routes on their way from completions to the columns of a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.expert_routes import ExpertRoutes, no_route, pad_routes, route_dtype
from skyrl_train.rollouts.collate import collate
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.joining import join_samples, merge_all_turns
from skyrl_train.rollouts.journal import RolloutJournal
from skyrl_train.rollouts.schedule import ScheduleState
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID
from skyrl_train_testing.tiny_models import build_character_tokenizer


def routes_of(*experts: int, num_experts: int = 8) -> ExpertRoutes:
    """Routes with one layer and one expert a token."""
    dtype = np.uint8 if num_experts < 255 else np.int16
    return ExpertRoutes(np.array(experts, dtype).reshape(-1, 1, 1))


def sample(prompt: list[int], response: list[int], mask: list[int], routes: ExpertRoutes | None) -> TrainingSample:
    return TrainingSample(prompt, response, mask, [0.0] * len(response), routes=routes)


def batch_of(*samples: TrainingSample) -> RolloutBatch:
    trajectories = [Trajectory(TrajectoryID("a", n), [each], "stop") for n, each in enumerate(samples)]
    return RolloutBatch([TrajectoryGroup("a", trajectories)])


def test_routes_are_in_token_columns():
    batch = batch_of(
        sample([5, 6, 7], [8, 9], [1, 1], routes_of(3, 4, 5, 6)),
        sample([5], [6, 7, 8], [1, 0, 0], routes_of(1)),
        sample([5], [6], [0], None),  # failed: nothing of it trains
    )
    column = collate(batch, build_character_tokenizer(), 1, with_routes=True).tensor("expert_routes")
    assert column.shape == (3, 6, 1, 1) and column.dtype == torch.uint8
    none = no_route(torch.uint8)
    assert column[..., 0, 0].tolist() == [
        [3, 4, 5, 6, none, none],
        [none, none, 1, none, none, none],
        [none] * 6,
    ]
    assert "expert_routes" not in collate(batch, build_character_tokenizer(), 1)


@pytest.mark.parametrize("routes, known", [(routes_of(1, 2, 3), 3), (None, 0)])
def test_trained_token_without_route_raises(routes: ExpertRoutes | None, known: int):
    batch = batch_of(sample([5, 6, 7], [8, 9, 10], [1, 1, 0], routes))
    with pytest.raises(ValueError, match=rf"prompt 'a' has expert routes of {known} positions, .* needs 4"):
        collate(batch, build_character_tokenizer(), 1, with_routes=True)


def test_many_experts_use_two_bytes_and_routes_of_two_models_are_refused():
    mask = torch.ones(2, 2)
    assert route_dtype(254) == torch.uint8 and route_dtype(255) == torch.int16
    column = pad_routes([routes_of(300, num_experts=512), None], mask)
    assert column is not None and column.dtype == torch.int16
    assert column[..., 0, 0].tolist() == [[300, 32767], [32767, 32767]]
    with pytest.raises(ValueError, match="one model"):
        pad_routes([routes_of(1), routes_of(1, num_experts=512)], mask)
    with pytest.raises(ValueError, match="row 0 has expert routes of 3 positions"):
        pad_routes([routes_of(1, 2, 3), None], mask)


def test_joined_turns_keep_first_routes_of_each_token():
    first = sample([1, 2], [3, 4], [1, 1], routes_of(0, 0, 0))
    second = sample([1, 2, 3, 4, 5], [6], [1], routes_of(7, 7, 7, 7, 7))
    joined = join_samples([first, second])
    assert joined.routes == routes_of(0, 0, 0, 7, 7)
    rewritten = sample([9, 9], [6], [1], routes_of(7, 7))  # its places are not those of the first
    samples = Trajectory(TrajectoryID("a", 0), [first, rewritten], "stop")
    assert merge_all_turns(samples).routes == first.routes


def test_async_journal_keeps_routes(tmp_path: Path):
    [group] = batch_of(
        sample([5], [6, 7], [1, 1], routes_of(1, 254)), sample([5], [6], [1], routes_of(300, num_experts=512))
    ).groups
    journal = RolloutJournal(tmp_path / "journal.jsonl", {"seed": 1})
    finished = FinishedGroup(ticket=0, group=group, metrics={}, version=3, seconds=1.0)
    journal.append_finished(finished)
    journal.close()
    state: Any = ScheduleState()
    recovered = RolloutJournal(tmp_path / "journal.jsonl", {"seed": 1}).recover(state)
    assert recovered.groups[0].group == group
