"""Recorded traffic of an agent as trajectory groups: turns become samples, and those that only append are joined."""

from collections.abc import Sequence

from skyrl_train.generators.base import Failure, TrajectoryID
from skyrl_train.inference_engines.openai_api.recorder import RecordedTurn
from skyrl_train.rollouts.joining import merge_appending_turns
from skyrl_train.rollouts.types import NO_VERSION, RolloutBatch, TrainingSample, Trajectory, grouped

_PLACEHOLDER = 0
"""A token id that every vocabulary has."""


def recorded_groups(
    trajectories: Sequence[Sequence[RecordedTurn]],
    rewards: Sequence[float],
    trajectory_ids: Sequence[TrajectoryID],
    temperature: float | None = None,
) -> RolloutBatch:
    """Return what a generator would have returned for these trajectories, step-wise.

    Consecutive turns of which each begins with the whole of the one before are one sample, with loss mask 0 on what
    came between; where an agent rewrote its history, or worked on several conversations at once, a new sample begins. A
    trajectory's reward stands on the last token of its last sample.

    Args:
        trajectories: the turns of each, as `RequestRecorder.take` returns them. One without turns is a failure.
        rewards: one a trajectory.
        trajectory_ids: which sample of which prompt each is.
        temperature: that of the trainer's log-probs. Turns drawn at another one do not train: their log-probs are those
            of another distribution. None: all train.
    """
    recorded = [
        _trajectory(turns, reward, trajectory_id, temperature) if turns else _without_turns(trajectory_id)
        for turns, reward, trajectory_id in zip(trajectories, rewards, trajectory_ids, strict=True)
    ]
    other_temperature = sum(not _trains(turn, temperature) for turns in trajectories for turn in turns)
    metrics = {
        "recorded/turns": float(sum(map(len, trajectories))),
        "recorded/turns_of_other_temperature": float(other_temperature),
        "recorded/trajectories_without_turns": float(sum(not turns for turns in trajectories)),
    }
    return RolloutBatch(grouped(recorded), metrics)


def _trajectory(
    turns: Sequence[RecordedTurn], reward: float, trajectory_id: TrajectoryID, temperature: float | None
) -> Trajectory:
    samples = [
        TrainingSample(
            prompt_ids=list(turn.prompt_ids),
            response_ids=list(turn.response_ids),
            loss_mask=[int(_trains(turn, temperature))] * len(turn.response_ids),
            rewards=[0.0] * len(turn.response_ids),
            log_probs=list(turn.log_probs),
            weight_versions=list(turn.weight_versions),
        )
        for turn in turns
    ]
    if samples[-1].rewards:
        samples[-1].rewards[-1] = float(reward)
    trajectory = Trajectory(trajectory_id, samples, turns[-1].stop_reason, is_step_wise=True)
    return merge_appending_turns(trajectory)


def _trains(turn: RecordedTurn, temperature: float | None) -> bool:
    return temperature is None or turn.temperature == temperature


def _without_turns(trajectory_id: TrajectoryID) -> Trajectory:
    message = "the agent got no answer in its session: it made no request, or all of them failed"
    sample = TrainingSample([_PLACEHOLDER], [_PLACEHOLDER], [0], [0.0], [0.0], [NO_VERSION])
    return Trajectory(trajectory_id, [sample], "abort", failure=Failure("infrastructure", message), is_step_wise=True)
