"""Recorded traffic of an agent as trajectories: turns become samples, and those that only append are joined.

A conversation that only grows is one row. Where a harness rewrites its history, drops thoughts, or works on several
conversations, rows begin alike and part: a tree (`rollouts/certificate.py`), each drawn token in the loss of one row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.endpoint.openai_api.prompts import Said
from skyrl_train.endpoint.recorder import (
    RecordedTurn,
    SessionRecord,
    is_continuation,
    order_in_chains,
    remove_repeats,
)
from skyrl_train.generators.base import Failure, TrajectoryID
from skyrl_train.rollouts.certificate import certificate_metrics, certify
from skyrl_train.rollouts.filters import map_samples, to_failed_sample
from skyrl_train.rollouts.joining import merge_appending_turns
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample, Trajectory

_PLACEHOLDER = 0
"""A token id that every vocabulary has."""


def recorded_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute `recorded/turns` (answers that are in a row), `recorded/trajectories_without_turns` and the metrics of
    the certificates."""
    certificates = [each.certificate for each in trajectories if each.certificate is not None]
    return {
        "recorded/turns": float(sum(len(each.turn_lengths) for each in trajectories)),
        "recorded/trajectories_without_turns": float(sum(not each.turn_lengths for each in trajectories)),
    } | certificate_metrics(certificates)


def recorded_trajectory(
    record: SessionRecord,
    reward: float,
    trajectory_id: TrajectoryID,
    temperature: float | None = None,
    failure: Failure | None = None,
) -> Trajectory:
    """Return a session as a step-wise trajectory with its certificate.

    Consecutive turns of which each begins with the whole of the one before are one sample, with loss mask 0 on what
    came between; where none does, a new sample begins. The reward stands on the last token of an answer.

    Args:
        temperature: that of the trainer's log-probs. Turns drawn at another one do not train: their log-probs are those
            of another distribution. None: all train.
        failure: makes it a failed trajectory, which trains nothing.
    """
    turns = order_in_chains(remove_repeats(record.turns))
    if not turns:
        return _without_turns(trajectory_id, failure)
    samples = [_sample(turn, temperature) for turn in turns]
    if (last := next((sample for sample in reversed(samples) if sample.rewards), None)) is not None:
        last.rewards[-1] = float(reward)
    trajectory = Trajectory(
        trajectory_id,
        samples,
        max(turns, key=lambda turn: turn.finished).stop_reason,  # the last row may be a sub-agent's, of long before
        is_step_wise=True,
        turn_lengths=[len(turn.response_ids) for turn in turns],
    )
    trajectory = merge_appending_turns(trajectory)
    if failure is not None:
        trajectory = replace(map_samples(trajectory, to_failed_sample), failure=failure, stop_reason="error")
    num_used = sum(trajectory.turn_lengths)
    other = sum(len(turn.response_ids) for turn in turns if not _trains(turn, temperature))
    certificate = certify(
        trajectory.samples,
        turns,
        num_drawn=record.num_generated,
        not_trained={
            "repeated_request": record.num_generated - num_used,
            "other_temperature": 0 if failure else other,
            "failed_trajectory": num_used if failure else 0,
            "unfinished_answers": record.num_admitted - record.num_answered,
        },
        new_rows=_reasons(turns),
    )
    return replace(trajectory, certificate=certificate)


def _sample(turn: RecordedTurn, temperature: float | None) -> TrainingSample:
    return TrainingSample(
        prompt_ids=list(turn.prompt_ids),
        response_ids=list(turn.response_ids),
        loss_mask=[int(_trains(turn, temperature))] * len(turn.response_ids),
        rewards=[0.0] * len(turn.response_ids),
        log_probs=list(turn.log_probs),
        weight_versions=list(turn.weight_versions),
    )


def _trains(turn: RecordedTurn, temperature: float | None) -> bool:
    return temperature is None or turn.temperature == temperature


def _reasons(turns: Sequence[RecordedTurn]) -> Counter[str]:
    """Count why rows after the first began.

    fork          another conversation goes on from the same answer
    rendered      an answer of the model is in the prompt, but not as it was drawn: something before it was changed, or
                  the chat template shows it otherwise
    edited        the prompt has assistant messages that the model did not write
    new_context   the prompt has none: a sub-agent, a history that was replaced by a summary
    """
    reasons: Counter[str] = Counter()
    for number, turn in enumerate(turns[1:], start=1):
        if is_continuation(turn, turns[number - 1]):
            continue
        said = [Said.of(message) for message in turn.messages or [] if message["role"] == "assistant"]
        answers = [Said.of(other.answer) for other in turns if other.answer is not None and other is not turn]
        if any(is_continuation(turn, other) for other in turns):
            reasons["fork"] += 1
        elif any(each in answers for each in said):
            reasons["rendered"] += 1
        else:
            reasons["edited" if said else "new_context"] += 1
    return reasons


def _without_turns(trajectory_id: TrajectoryID, failure: Failure | None) -> Trajectory:
    message = "the agent got no answer in its session: it made no request, or all of them failed"
    sample = TrainingSample([_PLACEHOLDER], [_PLACEHOLDER], [0], [0.0], [0.0], [NO_VERSION])
    failure = failure or Failure("infrastructure", message)
    return Trajectory(trajectory_id, [sample], "abort", failure=failure, is_step_wise=True)
