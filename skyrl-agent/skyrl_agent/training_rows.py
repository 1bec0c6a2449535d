"""Conversion of results to training rows. Pure functions that follow the rules in `finish`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_agent.chat.transitions import NO_VERSION, TrainingDatum, transitions_to_training_data
from skyrl_agent.errors import BatchFailedError
from skyrl_agent.finish import CONTEXT_WINDOW_EXCEEDED, ENDINGS, ERROR_AGENT, ERROR_EVALUATION, Ending, get_ending
from skyrl_agent.integrations.base import TrainingRows
from skyrl_agent.types import Failure, TrajectoryResult

PLACEHOLDER = 0
"""A token id that every vocabulary has: the prompt and the response of a trajectory without tokens."""


def training_rows(
    groups: Sequence[Sequence[TrajectoryResult]],
    max_response_length: int,
    *,
    profile_tools: bool = False,
    metrics: Mapping[str, float] | None = None,
) -> TrainingRows:
    """Convert results to rows, ordered by group and trajectory.

    A trajectory without tokens is one row of one token that trains nothing. A row that is longer than
    `max_response_length` is cut there, and its trajectory ends as CONTEXT_WINDOW_EXCEEDED. A reward that is missing or
    no finite number is a failure (error_evaluation).

    Args:
        groups: the results of each instance.
        max_response_length: of a row, in tokens.
        profile_tools: adds counts of tool calls to the metrics.
        metrics: further ones.
    """
    trajectories = [_Trajectory.of(result, max_response_length) for group in groups for result in group]
    group_of = [number for number, group in enumerate(groups) for _ in group]
    rows = [(number, row) for number, trajectory in enumerate(trajectories) for row in trajectory.rows]
    owner_of, data = [number for number, _ in rows], [row for _, row in rows]
    owners = [trajectories[number] for number in owner_of]
    return TrainingRows(
        prompt_token_ids=[row.input_tokens for row in data],
        response_ids=[row.response_tokens for row in data],
        loss_masks=[
            list(row.response_mask) if owner.ending.trains else [0] * len(row.response_mask)
            for owner, row in zip(owners, data, strict=True)
        ],
        rewards=[owner.reward for owner in owners],
        rollout_logprobs=_build_column(data, "response_logprobs", 0.0),
        is_last_episode=[row is owner.rows[-1] for owner, row in zip(owners, data, strict=True)],
        row_trajectory=owner_of,
        traj_idx=[f"{owner.result.instance_id}-traj{owner.result.trajectory_id}" for owner in owners],
        traj_rewards=[trajectory.reward for trajectory in trajectories],
        episode_nums=[len(trajectory.rows) for trajectory in trajectories],
        finish_reasons=[trajectory.finish_reason for trajectory in trajectories],
        in_baseline=[trajectory.in_baseline for trajectory in trajectories],
        failures=[trajectory.failure for trajectory in trajectories],
        weight_versions=_build_column(data, "weight_versions", NO_VERSION),
        rollout_metrics=_compute_metrics(trajectories, group_of, profile_tools) | dict(metrics or {}),
        groups=group_of,
        instance_ids=[trajectory.result.instance_id for trajectory in trajectories],
        trajectory_ids=[trajectory.result.trajectory_id for trajectory in trajectories],
    )


def check_batch(failures: Sequence[Failure | None], in_baseline: Sequence[bool]) -> None:
    """
    Args:
        failures, in_baseline: [T]

    Raises:
        BatchFailedError: no trajectory of a non-empty batch has a reward.
    """
    if any(in_baseline) or not in_baseline:
        return
    causes = Counter(f"{failure.stage}: {failure.message}" if failure else "unknown reason" for failure in failures)
    cause, count = causes.most_common(1)[0]
    raise BatchFailedError(f"all {len(in_baseline)} trajectories failed, {count} of them with the cause: {cause}")


def compute_trajectory_advantages(
    rows: TrainingRows, baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
) -> list[float]:
    """Compute the advantage of each trajectory [T] over its group:

        group_mean      A = R - mean of the group
        leave_one_out   A = R - mean of the others

    over trajectories in the baseline. The advantage is 0 for all others, and for the only member of a group.
    """
    members: dict[int, list[float]] = {}
    for group, reward, counts in zip(rows.groups, rows.traj_rewards, rows.in_baseline, strict=True):
        if counts:
            members.setdefault(group, []).append(reward)
    advantages = []
    for group, reward, counts in zip(rows.groups, rows.traj_rewards, rows.in_baseline, strict=True):
        rewards = members.get(group, [])
        if not counts or len(rewards) < 2:
            advantages.append(0.0)
            continue
        scale = len(rewards) / (len(rewards) - 1) if baseline == "leave_one_out" else 1.0
        advantages.append((reward - sum(rewards) / len(rewards)) * scale)
    return advantages


def repeat_for_rows(rows: TrainingRows, values: Sequence[float]) -> list[float]:
    """Repeat values of trajectories [T] for each of their rows [R]."""
    return [values[number] for number in rows.row_trajectory]


@dataclass(frozen=True)
class _Trajectory:
    """Graded result."""

    result: TrajectoryResult
    rows: list[TrainingDatum]
    finish_reason: str
    reward: float
    in_baseline: bool
    failure: Failure | None

    @property
    def ending(self) -> Ending:
        return get_ending(self.finish_reason)

    @property
    def is_masked(self) -> bool:
        return not self.ending.trains

    @classmethod
    def of(cls, result: TrajectoryResult, max_response_length: int) -> "_Trajectory":
        rows, failure_of_rows = _build_rows(result)
        failure = result.failure or failure_of_rows or _reward_failure(result)
        reason = result.finish_reason or ERROR_AGENT
        if failure is not None and get_ending(reason).in_baseline:
            reason = ERROR_AGENT if failure is failure_of_rows else ERROR_EVALUATION
        is_too_long = any(len(row.response_tokens) > max_response_length for row in rows)
        if is_too_long and get_ending(reason).trains:
            reason = CONTEXT_WINDOW_EXCEEDED
        return cls(
            result=result,
            rows=[_truncate(row, max_response_length) for row in rows],
            finish_reason=reason,
            reward=float(result.reward or 0.0) if failure is None else 0.0,
            in_baseline=get_ending(reason).in_baseline,
            failure=failure,
        )


def _reward_failure(result: TrajectoryResult) -> Failure | None:
    if result.reward is None and get_ending(result.finish_reason).evaluated:
        return Failure("evaluate", "reward", "it has no reward")
    if result.reward is not None and not math.isfinite(result.reward):
        return Failure("evaluate", "reward", f"a reward must be a finite number; got {result.reward}")
    return None


def _build_rows(result: TrajectoryResult) -> tuple[list[TrainingDatum], Failure | None]:
    """Return at least one row, and the failure of malformed transitions."""
    try:
        rows, failure = transitions_to_training_data(result.transitions), None
    except ValueError as error:
        rows, failure = [], Failure("generate", "model", str(error))
    return rows or [TrainingDatum([PLACEHOLDER], [PLACEHOLDER], None, [0])], failure


def _truncate(row: TrainingDatum, length: int) -> TrainingDatum:
    return TrainingDatum(
        input_tokens=row.input_tokens or [PLACEHOLDER],
        response_tokens=row.response_tokens[:length],
        response_logprobs=None if row.response_logprobs is None else row.response_logprobs[:length],
        response_mask=row.response_mask[:length],
        weight_versions=None if row.weight_versions is None else row.weight_versions[:length],
    )


def _build_column(rows: Sequence[TrainingDatum], name: str, not_written: float) -> list[list[Any]] | None:
    """Return one value per token, `not_written` for tokens not generated; None if a generated token has no value."""
    values = [getattr(row, name) for row in rows]
    if any(value is None and any(row.response_mask) for row, value in zip(rows, values, strict=True)):
        return None
    return [
        [not_written] * len(row.response_tokens) if value is None else value
        for row, value in zip(rows, values, strict=True)
    ]


def _compute_metrics(
    trajectories: Sequence[_Trajectory], group_of: Sequence[int], profile_tools: bool
) -> dict[str, float]:
    """Compute `rollout_metrics/`: ratios over all trajectories; rewards over those that have one. A mean without values
    is left out."""
    solved: dict[int, list[bool]] = {}
    for group, trajectory in zip(group_of, trajectories, strict=True):
        if trajectory.in_baseline:
            solved.setdefault(group, []).append(trajectory.reward > 0)
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.in_baseline]
    reasons = Counter(trajectory.ending.metric for trajectory in trajectories)
    num = len(trajectories)
    found: dict[str, float | None] = {
        ending.metric: reasons[ending.metric] / num if num else None for ending in ENDINGS.values()
    }
    found |= {
        "avg_turn_assistant": _mean([_count_turns(trajectory.result) for trajectory in trajectories]),
        "num_all_resolved": sum(all(group) for group in solved.values()),
        "num_none_resolved": sum(not any(group) for group in solved.values()),
        "num_mask_out": sum(trajectory.is_masked for trajectory in trajectories),
        "num_mask_non_zero_reward": sum(trajectory.is_masked and trajectory.reward != 0 for trajectory in trajectories),
        "raw_reward": _mean(rewards),
        "num_empty_messages": sum(not trajectory.result.messages for trajectory in trajectories),
    }
    if profile_tools:
        found |= _compute_tool_metrics([trajectory.result for trajectory in trajectories])
    return {f"rollout_metrics/{name}": float(value) for name, value in found.items() if value is not None}


def _count_turns(result: TrajectoryResult) -> int:
    return sum(message.get("role") == "assistant" for message in result.messages)


def _compute_tool_metrics(results: Sequence[TrajectoryResult]) -> dict[str, float | None]:
    names = Counter(call.name for result in results for call in result.tool_calls)
    found: dict[str, float | None] = {f"tool_name/{name}": float(count) for name, count in names.items()}
    for key, skipped in (("tool_calls", ()), ("tool_calls_no_finish", ("finish",))):
        counts = [sum(call.name not in skipped for call in result.tool_calls) for result in results]
        found |= {
            f"{key}_total": sum(counts),
            f"{key}_per_traj_mean": _mean(counts),
            f"{key}_per_traj_min": min(counts, default=0),
            f"{key}_per_traj_max": max(counts, default=0),
        }
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
