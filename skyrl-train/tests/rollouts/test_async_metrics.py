"""Metrics of asynchronous training and the masking of old tokens, with numbers that can be counted by hand."""

import pytest

from skyrl_train.rollouts.async_metrics import compute_group_metrics, compute_pool_metrics
from skyrl_train.rollouts.groups import FinishedGroup, mask_stale
from skyrl_train.rollouts.pool import PoolCounts
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample, Trajectory, TrajectoryGroup, TrajectoryID


def sample(versions: list[int] | None, mask: list[int] | None = None) -> TrainingSample:
    length = len(versions or mask or [])
    loss_mask = mask or [int(version != NO_VERSION) for version in versions or []]
    return TrainingSample([1], [2] * length, loss_mask, [0.0] * length, [-1.0] * length, versions)


def group(*samples: TrainingSample) -> TrajectoryGroup:
    return TrajectoryGroup("a", [Trajectory(TrajectoryID("a", i), [each]) for i, each in enumerate(samples)])


def finished(*versions: list[int] | None, version: int = 0, seconds: float = 1.0) -> FinishedGroup:
    samples = [sample(each, None if each is not None else [1, 1]) for each in versions]
    return FinishedGroup(ticket=0, group=group(*samples), metrics={}, version=version, seconds=seconds)


GROUPS = [
    # Two turns, with two tokens of the environment between them: 4 is in the first turn after a sync, 7 in the second.
    finished([3, 3, 4, NO_VERSION, NO_VERSION, 6, 7], [4, 4, 4], seconds=2.0),
    finished([6, 6], [7], version=6, seconds=4.0),
]


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_metrics_are_computed_for_two_groups_trained_on_version_seven(keeps_cache: bool):
    """Eleven tokens are generated: of versions 3 (two), 4 (four), 6 (three), 7 (two). Two follow a sync in a turn."""
    metrics = compute_group_metrics(GROUPS, trained_version=7, bound=2, keeps_cache=keeps_cache)
    assert metrics == pytest.approx(
        {
            "async/staleness_mean": (4 + 1) / 2,
            "async/staleness_max": 4,
            "async/staleness_min": 1,
            "async/staleness_ratio": 1,
            "async/staleness_violation_count": 1,
            "async/staleness_0": 0,
            "async/staleness_1": 1 / 2,
            "async/staleness_2": 0,
            "async/versions_per_trajectory_mean": (4 + 1 + 1 + 1) / 4,
            "async/versions_per_trajectory_max": 4,
            "async/stale_token_share": 6 / 11,
            "async/interrupted_token_share": 2 / 11,
            "async/mixed_cache_token_share": 2 / 11 if keeps_cache else 0,
            "async/group_seconds_mean": 3,
            "async/group_seconds_max": 4,
        }
    )


def test_group_without_versions_has_age_since_start():
    metrics = compute_group_metrics([finished(None, version=5)], trained_version=7, bound=4, keeps_cache=True)
    assert metrics["async/staleness_max"] == 2
    shares = ("versions_per_trajectory_mean", "stale_token_share", "interrupted_token_share", "mixed_cache_token_share")
    assert [metrics[f"async/{name}"] for name in shares] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("versions", "num_interrupted"),
    [
        ([3, 3, 3], 0),
        ([3, 4, 4], 2),
        ([3, 4, 5], 2),
        ([3, NO_VERSION, 4, 4], 0),  # the second turn begins after the sync
        ([NO_VERSION, 3, NO_VERSION, NO_VERSION, 4, 5], 1),
    ],
)
def test_interrupted_tokens_are_tokens_after_sync_within_turn(versions: list[int], num_interrupted: int):
    num_generated = sum(version != NO_VERSION for version in versions)
    metrics = compute_group_metrics([finished(versions)], trained_version=5, bound=9, keeps_cache=True)
    assert metrics["async/interrupted_token_share"] == pytest.approx(num_interrupted / num_generated)
    assert metrics["async/mixed_cache_token_share"] == metrics["async/interrupted_token_share"]


def test_mask_excludes_tokens_before_oldest_version():
    masked = mask_stale(
        group(
            sample([2, 3, NO_VERSION, 4]),
            sample([3, 2, 4], mask=[0, 1, 1]),  # what is masked for another reason stays so
            sample([2, 2]),
            sample(None, mask=[1, 0]),  # of unknown version
        ),
        oldest=3,
    )
    masks = [each.samples[0].loss_mask for each in masked.trajectories]
    assert masks == [[0, 1, 0, 1], [0, 0, 1], [0, 0], [1, 0]]
    assert [each.samples[0].log_probs for each in masked.trajectories][2] == [-1.0, -1.0]


def test_pool_metrics_are_computed_over_ten_seconds():
    """A step of 8 s waits 2 s for groups. Up to six groups run: 30 s of them in 10 s, and none in the last 2 s."""
    counts = PoolCounts(
        num_failed=1, num_filtered=2, num_stale=3, running_seconds=30.0, busy_seconds=8.0, wall_seconds=10.0
    )
    assert compute_pool_metrics(counts, num_trained=4, max_running=6, waited=2.0, step=8.0) == pytest.approx(
        {
            "async/num_failed_groups": 1,
            "async/num_filtered_groups": 2,
            "async/num_stale_groups": 3,
            "async/keep_rate": 4 / 10,
            "async/trainer_utilisation": 6 / 8,
            "async/generation_utilisation": 8 / 10,
            "async/running_groups_mean": 3,
            "async/slot_utilisation": 1 / 2,
        }
    )
