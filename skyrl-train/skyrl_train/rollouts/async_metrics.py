"""Metrics of asynchronous training: staleness of groups and tokens, utilisation of generation and training."""

from collections import Counter
from collections.abc import Sequence

from skyrl_train.rollouts.groups import FinishedGroup, get_known_versions
from skyrl_train.rollouts.pool import PoolCounts
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample


def compute_group_metrics(
    groups: Sequence[FinishedGroup], trained_version: int, bound: int, *, keeps_cache: bool
) -> dict[str, float]:
    """Compute metrics of the groups of a training step.

    Args:
        trained_version: weight version of the policy that trains on them.
        bound: `max_staleness_steps`.
        keeps_cache: requests continue across a weight sync with the KV cache of the previous weights.

    Returns:
        under `async/`: `staleness_{mean,max,min}` in steps, of each group's oldest token; `staleness_ratio`, the
        fraction of groups above 0; `staleness_violation_count`, groups above `bound`; `staleness_<n>` for n from 0 to
        `bound`, the fraction of groups with staleness n; `versions_per_trajectory_{mean,max}`; `stale_token_share`, the
        fraction of generated tokens older than `bound` (which are not trained); `interrupted_token_share`, the fraction
        of tokens generated after a weight sync within their turn; `mixed_cache_token_share`, the fraction of tokens
        generated with a KV cache of other weights; `group_seconds_{mean,max}`.
    """
    ages = [trained_version - group.oldest_version for group in groups]
    shares = Counter(ages)
    trajectories = [trajectory for group in groups for trajectory in group.group.trajectories]
    versions = [
        len(set(get_known_versions([trajectory]))) for trajectory in trajectories if get_known_versions([trajectory])
    ]
    samples = [sample for trajectory in trajectories for sample in trajectory.samples]
    generated = get_known_versions(trajectories)
    num_generated = len(generated)
    interrupted = sum(map(_count_interrupted, samples)) / max(1, num_generated)
    seconds = [group.seconds for group in groups]
    metrics = {
        "staleness_mean": sum(ages) / len(ages),
        "staleness_max": max(ages),
        "staleness_min": min(ages),
        "staleness_ratio": sum(age > 0 for age in ages) / len(ages),
        "staleness_violation_count": sum(age > bound for age in ages),
        **{f"staleness_{age}": shares[age] / len(ages) for age in range(bound + 1)},
        "versions_per_trajectory_mean": sum(versions) / max(1, len(versions)),
        "versions_per_trajectory_max": max(versions, default=0),
        "stale_token_share": sum(trained_version - version > bound for version in generated) / max(1, num_generated),
        "interrupted_token_share": interrupted,
        "mixed_cache_token_share": interrupted if keeps_cache else 0.0,
        "group_seconds_mean": sum(seconds) / len(seconds),
        "group_seconds_max": max(seconds),
    }
    return {f"async/{name}": float(value) for name, value in metrics.items()}


def compute_pool_metrics(
    counts: PoolCounts, num_trained: int, max_running: int, waited: float, step: float
) -> dict[str, float]:
    """Compute metrics of the pool since the last step.

    Args:
        num_trained: number of groups that the step trained.
        max_running: number of groups that may be generated at once.
        waited, step: seconds that the trainer waited for groups, and duration of the step in seconds.

    Returns:
        under `async/`: counts of groups that failed, were filtered or became stale; `keep_rate`, the fraction of groups
        that were trained; `trainer_utilisation`, the fraction of the step not spent waiting for groups;
        `generation_utilisation`, the fraction of time in which any group was generated; `running_groups_mean`;
        `slot_utilisation`, which is `running_groups_mean` divided by `max_running`.
    """
    num_dropped = counts.num_failed + counts.num_filtered + counts.num_stale
    running = counts.running_seconds / max(counts.wall_seconds, 1e-9)
    metrics = {
        "num_failed_groups": counts.num_failed,
        "num_filtered_groups": counts.num_filtered,
        "num_stale_groups": counts.num_stale,
        "keep_rate": num_trained / (num_trained + num_dropped),
        "trainer_utilisation": 1 - waited / max(step, 1e-9),
        "generation_utilisation": counts.busy_seconds / max(counts.wall_seconds, 1e-9),
        "running_groups_mean": running,
        "slot_utilisation": running / max_running,
    }
    return {f"async/{name}": float(value) for name, value in metrics.items()}


def _count_interrupted(sample: TrainingSample) -> int:
    """Count the tokens whose weight version differs from the first token of their turn."""
    count, first = 0, NO_VERSION
    for version in sample.weight_versions or []:
        if version == NO_VERSION or first == NO_VERSION:
            first = version  # the next generated token starts a turn
        elif version != first:
            count += 1
    return count
