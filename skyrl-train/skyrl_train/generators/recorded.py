"""Conversion of an agent's recorded requests to trajectories: turns become samples, and turns that only append are
merged.

A conversation that only grows is one row. If a harness rewrites its history, drops thoughts, or uses several
conversations, rows with common beginnings form a tree (`rollouts/certificate.py`), in which each sampled token is in
the loss of exactly one row.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from skyrl_train.endpoint.openai_api.prompts import ReturnedMessage
from skyrl_train.endpoint.recorder import (
    RecordedTurn,
    SessionRecord,
    is_continuation,
    order_in_chains,
    remove_repeats,
)
from skyrl_train.generators.base import Failure, TrajectoryID
from skyrl_train.rollouts.certificate import compute_certificate_metrics, create_certificate
from skyrl_train.rollouts.filters import map_samples, to_failed_sample
from skyrl_train.rollouts.joining import merge_appending_turns
from skyrl_train.rollouts.types import NO_VERSION, TrainingSample, Trajectory

_PLACEHOLDER = 0
"""A token id that every vocabulary has."""


def compute_recorded_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute `recorded/turns` (completions included in a row), `recorded/trajectories_without_turns` and the
    certificate metrics."""
    certificates = [each.certificate for each in trajectories if each.certificate is not None]
    return {
        "recorded/turns": float(sum(len(each.turn_lengths) for each in trajectories)),
        "recorded/trajectories_without_turns": float(sum(not each.turn_lengths for each in trajectories)),
    } | compute_certificate_metrics(certificates)


def build_recorded_trajectory(
    record: SessionRecord,
    reward: float,
    trajectory_id: TrajectoryID,
    temperature: float | None = None,
    failure: Failure | None = None,
) -> Trajectory:
    """Convert a session to a step-wise trajectory with its certificate.

    Consecutive turns that each start with the whole previous turn form one sample, with loss mask 0 on the tokens in
    between; otherwise a new sample starts. The reward is on the last token of a completion.

    Args:
        temperature: temperature of the trainer's log-probs. Turns sampled at another temperature are masked, since
            their log-probs belong to another distribution. None: all turns train.
        failure: failure of the trajectory, which masks all its tokens.
    """
    turns = order_in_chains(remove_repeats(record.turns))
    if not turns:
        return _build_empty_trajectory(trajectory_id, failure)
    samples = [_sample(turn, temperature) for turn in turns]
    if (last := next((sample for sample in reversed(samples) if sample.rewards), None)) is not None:
        last.rewards[-1] = float(reward)
    trajectory = Trajectory(
        trajectory_id,
        samples,
        max(turns, key=lambda turn: turn.finished).stop_reason,  # the last row may belong to an earlier sub-agent
        is_step_wise=True,
        turn_lengths=[len(turn.response_ids) for turn in turns],
    )
    trajectory = merge_appending_turns(trajectory)
    if failure is not None:
        trajectory = replace(map_samples(trajectory, to_failed_sample), failure=failure, stop_reason="error")
    num_used = sum(trajectory.turn_lengths)
    other = sum(len(turn.response_ids) for turn in turns if not _trains(turn, temperature))
    certificate = create_certificate(
        trajectory.samples,
        turns,
        num_drawn=record.num_generated,
        not_trained={
            "repeated_request": record.num_generated - num_used,
            "other_temperature": 0 if failure else other,
            "failed_trajectory": num_used if failure else 0,
            "unfinished_answers": record.num_admitted - record.num_answered,
        },
        new_rows=_count_reasons(turns),
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


def _count_reasons(turns: Sequence[RecordedTurn]) -> Counter[str]:
    """Count the reasons why rows after the first started.

    fork          another conversation continues from the same completion
    rendered      a completion is in the prompt, but with other tokens: earlier text was changed, or the chat template
                  renders it differently
    edited        the prompt has assistant messages that the model did not generate
    new_context   the prompt has none: a sub-agent, a history that was replaced by a summary
    """
    reasons: Counter[str] = Counter()
    for number, turn in enumerate(turns[1:], start=1):
        if is_continuation(turn, turns[number - 1]):
            continue
        said = [ReturnedMessage.of(message) for message in turn.messages or [] if message["role"] == "assistant"]
        answers = [
            ReturnedMessage.of(other.answer) for other in turns if other.answer is not None and other is not turn
        ]
        if any(is_continuation(turn, other) for other in turns):
            reasons["fork"] += 1
        elif any(each in answers for each in said):
            reasons["rendered"] += 1
        else:
            reasons["edited" if said else "new_context"] += 1
    return reasons


def _build_empty_trajectory(trajectory_id: TrajectoryID, failure: Failure | None) -> Trajectory:
    message = "the agent received no completion in its session: it made no request, or all of them failed"
    sample = TrainingSample([_PLACEHOLDER], [_PLACEHOLDER], [0], [0.0], [0.0], [NO_VERSION])
    failure = failure or Failure("infrastructure", message)
    return Trajectory(trajectory_id, [sample], "abort", failure=failure, is_step_wise=True)
