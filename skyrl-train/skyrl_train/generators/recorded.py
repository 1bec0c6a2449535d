"""Recorded traffic of an agent as training samples: turns become rows, and those that only append are joined."""

from collections.abc import Sequence

from skyrl_train.generators.base import Failure, GeneratorOutput, TrajectoryID
from skyrl_train.generators.dialogue import NOT_WRITTEN
from skyrl_train.generators.step_wise import merge_steps
from skyrl_train.inference_engines.openai_api.recorder import RecordedTurn

_PLACEHOLDER = 0
"""A token id that every vocabulary has."""


def recorded_output(
    trajectories: Sequence[Sequence[RecordedTurn]],
    rewards: Sequence[float],
    trajectory_ids: Sequence[TrajectoryID],
    temperature: float | None = None,
) -> GeneratorOutput:
    """What a generator would have returned for these trajectories, in the step-wise form (`is_last_step`).

    Consecutive turns of which each begins with the whole of the one before are one row, with loss mask 0 on what came
    between; where an agent rewrote its history, or worked on several conversations at once, a new row begins. A
    trajectory's reward stands on the last token of its last row.

    Args:
        trajectories: the turns of each, as `RequestRecorder.take` returns them. One without turns is a failure.
        rewards: one a trajectory.
        trajectory_ids: which sample of which prompt each is.
        temperature: that of the trainer's log-probs. Turns drawn at another one do not train: their log-probs are those
            of another distribution. None: all train.
    """
    output = GeneratorOutput(
        prompt_token_ids=[],
        response_ids=[],
        rewards=[],
        loss_masks=[],
        stop_reasons=[],
        rollout_metrics={},
        rollout_logprobs=[],
        trajectory_ids=[],
        is_last_step=[],
        weight_versions=[],
        failures=[],
    )
    other_temperature = 0
    for turns, reward, trajectory_id in zip(trajectories, rewards, trajectory_ids, strict=True):
        if not turns:
            _add_failure(output, trajectory_id)
        for number, turn in enumerate(turns):
            is_last = number == len(turns) - 1
            trains = temperature is None or turn.temperature == temperature
            other_temperature += not trains
            _add_row(output, turn, reward if is_last else 0.0, int(trains))
            _column(output, "trajectory_ids").append(trajectory_id)
            _column(output, "is_last_step").append(is_last)
            _column(output, "stop_reasons").append(turns[-1].stop_reason)
            _column(output, "failures").append(None)
    output["rollout_metrics"] = {
        "recorded/turns": float(sum(map(len, trajectories))),
        "recorded/turns_of_other_temperature": float(other_temperature),
        "recorded/trajectories_without_turns": float(sum(not turns for turns in trajectories)),
    }
    return merge_steps(output)


def _add_row(output: GeneratorOutput, turn: RecordedTurn, reward: float, mask: int) -> None:
    _column(output, "prompt_token_ids").append(list(turn.prompt_ids))
    _column(output, "response_ids").append(list(turn.response_ids))
    _column(output, "rewards").append(reward)
    _column(output, "loss_masks").append([mask] * len(turn.response_ids))
    _column(output, "rollout_logprobs").append(list(turn.log_probs))
    _column(output, "weight_versions").append(list(turn.weight_versions))


def _add_failure(output: GeneratorOutput, trajectory_id: TrajectoryID) -> None:
    message = "the agent got no answer in its session: it made no request, or all of them failed"
    row = {
        "prompt_token_ids": [_PLACEHOLDER],
        "response_ids": [_PLACEHOLDER],
        "rewards": 0.0,
        "loss_masks": [0],
        "rollout_logprobs": [0.0],
        "weight_versions": [NOT_WRITTEN],
        "trajectory_ids": trajectory_id,
        "is_last_step": True,
        "stop_reasons": "abort",
        "failures": Failure("infrastructure", message),
    }
    for name, value in row.items():
        _column(output, name).append(value)


def _column(output: GeneratorOutput, name: str) -> list:
    return output[name]
