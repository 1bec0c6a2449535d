"""Filters: functions that exclude trajectories or groups from training. They return new objects."""

from collections.abc import Callable, Collection
from dataclasses import replace

from skyrl_train.algorithms.sampling import TOLERANCE, find_informative_groups
from skyrl_train.rollouts.types import NO_VERSION, RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup


def map_trajectories(batch: RolloutBatch, function: Callable[[Trajectory], Trajectory]) -> RolloutBatch:
    """Apply a function to every trajectory of the batch."""
    groups = [replace(group, trajectories=[function(each) for each in group.trajectories]) for group in batch.groups]
    return replace(batch, groups=groups)


def map_samples(trajectory: Trajectory, function: Callable[[TrainingSample], TrainingSample]) -> Trajectory:
    return replace(trajectory, samples=[function(sample) for sample in trajectory.samples])


# ---- of a trajectory


def mask_trajectory(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with every token masked."""
    return map_samples(trajectory, lambda sample: replace(sample, loss_mask=[0] * len(sample.loss_mask)))


def remove_rewards(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory with reward 0 on every token."""
    return map_samples(trajectory, lambda sample: replace(sample, rewards=[0.0] * len(sample.rewards)))


def zero_reward_on_non_stop(trajectory: Trajectory) -> Trajectory:
    """Set the rewards of a trajectory to 0 unless its stop reason is `stop`: `generator.zero_reward_on_non_stop`."""
    return trajectory if trajectory.stop_reason == "stop" else remove_rewards(trajectory)


def mask_overlong(trajectory: Trajectory) -> Trajectory:
    """Mask a trajectory that was truncated by length (DAPO's overlong filtering, https://arxiv.org/abs/2503.14476):
    `generator.apply_overlong_filtering`.

    The stop reason decides: a trajectory ended by its environment without an end-of-sequence token is kept, a
    trajectory truncated directly after such a token is masked.
    """
    return mask_trajectory(trajectory) if trajectory.stop_reason == "length" else trajectory


def mask_unended(trajectory: Trajectory, end_token_id: int | Collection[int] | None) -> Trajectory:
    """Mask a trajectory whose last token does not end a turn: `generator.overlong_filtering_by=end_token`.

    Args:
        end_token_id: all ids that end a turn (`TurnEnds.ids`). With a single id, such as `tokenizer.eos_token_id`, a
            trajectory with the stop reason `stop` also counts as ended, since a model may have several such ids.
    """
    response_ids = trajectory.samples[-1].response_ids if trajectory.samples else []
    if isinstance(end_token_id, Collection):
        ended = bool(response_ids) and response_ids[-1] in end_token_id
    else:
        ended = response_ids[-1:] == [end_token_id] or trajectory.stop_reason == "stop"
    return trajectory if ended else mask_trajectory(trajectory)


def to_failed_sample(sample: TrainingSample) -> TrainingSample:
    """Return the tokens of a sample for a failed trajectory: all masked, with reward 0."""
    length = len(sample.response_ids)
    return TrainingSample(
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        loss_mask=[0] * length,
        rewards=[0.0] * length,
        log_probs=None if sample.log_probs is None else [0.0] * length,
        weight_versions=None if sample.weight_versions is None else [NO_VERSION] * length,
    )


# ---- of a group


def get_scores(group: TrajectoryGroup) -> list[float | None]:
    """Return the reward of each trajectory; None for a failed trajectory, and for a single successful trajectory of a
    group, which has nothing to be compared with."""
    num_valid = sum(trajectory.failure is None for trajectory in group.trajectories)
    too_few = num_valid < min(2, len(group.trajectories))
    return [None if too_few or each.failure is not None else each.reward for each in group.trajectories]


def is_informative(group: TrajectoryGroup, tolerance: float = TOLERANCE) -> bool:
    """Check that the rewards of a group differ by more than `tolerance`, so that the group has a gradient (see
    `algorithms.sampling`)."""
    return bool(find_informative_groups(get_scores(group), [group.uid] * len(group.trajectories), tolerance))


def set_uid(group: TrajectoryGroup, uid: str) -> TrajectoryGroup:
    """Return the group and its trajectories under another uid."""
    trajectories = [replace(each, id=replace(each.id, instance_id=uid)) for each in group.trajectories]
    return TrajectoryGroup(uid, trajectories)
