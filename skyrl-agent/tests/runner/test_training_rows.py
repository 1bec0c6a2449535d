"""Results as training rows: what trains, what is compared, and what is only counted."""

from typing import Any

import pytest

from skyrl_agent.chat.transitions import Observation, TokensWithLogprobs, Transition
from skyrl_agent.finish import ENDINGS
from skyrl_agent.training_rows import compute_trajectory_advantages, repeat_for_rows, training_rows
from skyrl_agent.types import Failure, ToolCallRecord, TrajectoryResult

INFRASTRUCTURE = ("error_runtime", "error_evaluation", "error_agent", "cancelled")


def turn(
    read: list[int], wrote: list[int] | None, logprob: float | None = -0.5, version: int | None = None
) -> Transition:
    ids = wrote or []
    action = TokensWithLogprobs(
        wrote,
        None if logprob is None else [logprob] * len(ids),
        weight_versions=None if version is None else [version] * len(ids),
    )
    return Transition(Observation(read), action)


def result(finish_reason: str | None = "FINISH_TOOL", reward: float | None = 1.0, **fields: Any) -> TrajectoryResult:
    fields = {"transitions": [turn([1, 2], [3]), turn([1, 2, 3, 4], [5, 6])], "instance_id": "a"} | fields
    fields.setdefault("messages", [{"role": "user", "content": ""}, *[{"role": "assistant", "content": ""}] * 2])
    return TrajectoryResult(finish_reason=finish_reason, reward=reward, **fields)


def test_appending_turns_make_one_row_with_loss_on_model_tokens():
    rows = training_rows([[result()]], 100)
    assert rows.prompt_token_ids == [[1, 2]]
    assert rows.response_ids == [[3, 4, 5, 6]]
    assert rows.loss_masks == [[1, 0, 1, 1]]
    assert rows.rollout_logprobs == [[-0.5, 0.0, -0.5, -0.5]]
    assert (rows.rewards, rows.traj_rewards, rows.is_last_episode) == ([1.0], [1.0], [True])
    assert rows.traj_idx == ["a-traj0"]


@pytest.mark.parametrize(
    "finish_reason, metric, trains, in_baseline",
    [
        ("FINISH_TOOL", "finish_tool_ratio", True, True),
        ("FINISH", "finish_ratio", True, True),
        ("CONTEXT_WINDOW_EXCEEDED", "context_exceed_ratio", False, True),
        ("max_iterations_reached", "iter_cap_ratio", False, True),
        ("stuck_in_a_loop", "stuck_in_a_loop_ratio", False, True),
        ("BAD_LLM_RESPONSE", "bad_llm_response", False, True),
        ("no_git_patch", "no_git_patch", True, True),
        ("cmd_timeout", "cmd_timeout", False, True),
        ("error_runtime", "error_runtime", False, False),
        ("error_evaluation", "error_evaluation", False, False),
        ("error_agent", "error_agent", False, False),
        ("cancelled", "cancelled", False, False),
        ("error: of another release", "error_agent", False, False),
        (None, "error_agent", False, False),
    ],
)
def test_finish_reason_determines_loss_and_baseline(
    finish_reason: str | None, metric: str, trains: bool, in_baseline: bool
):
    """One that ended so beside one that finished with reward 0."""
    failure = None if in_baseline else Failure("generate", "infrastructure", "gone")
    reward = 1.0 if in_baseline and finish_reason != "no_git_patch" else None
    rows = training_rows([[result(finish_reason, reward, failure=failure), result(reward=0.0, trajectory_id=1)]], 100)
    assert rows.loss_masks == [[1, 0, 1, 1] if trains else [0] * 4, [1, 0, 1, 1]]
    assert rows.in_baseline == [in_baseline, True]
    assert rows.traj_rewards == [reward or 0.0, 0.0]
    assert rows.rollout_metrics[f"rollout_metrics/{metric}"] == (1.0 if metric == "finish_tool_ratio" else 0.5)
    assert rows.rollout_metrics["rollout_metrics/num_mask_out"] == (not trains)
    assert rows.rollout_metrics["rollout_metrics/num_mask_non_zero_reward"] == (not trains and in_baseline)
    assert rows.rollout_metrics["rollout_metrics/raw_reward"] == ((reward or 0.0) / 2 if in_baseline else 0.0)
    advantages = compute_trajectory_advantages(rows)
    assert advantages == [(reward or 0.0) / 2, -(reward or 0.0) / 2]


def test_all_finish_reasons_are_covered():
    mark = next(
        mark for mark in test_finish_reason_determines_loss_and_baseline.pytestmark if mark.name == "parametrize"
    )  # type: ignore[attr-defined]
    assert set(ENDINGS) <= {row[0] for row in mark.args[1]}


@pytest.mark.parametrize("finish_reason", INFRASTRUCTURE)
def test_trajectory_without_tokens_becomes_masked_token(finish_reason: str):
    lost = result(finish_reason, None, transitions=[], messages=[])
    rows = training_rows([[lost, result(trajectory_id=1, reward=0.5), result(trajectory_id=2, reward=1.0)]], 100)
    assert [len(ids) for ids in rows.prompt_token_ids] == [1, 2, 2]
    assert (len(rows.response_ids[0]), rows.loss_masks[0], rows.traj_rewards[0]) == (1, [0], 0.0)
    assert rows.rollout_logprobs is not None and rows.rollout_logprobs[0] == [0.0]
    assert rows.rollout_metrics["rollout_metrics/num_empty_messages"] == 1
    assert compute_trajectory_advantages(rows) == [0.0, -0.25, 0.25]
    assert compute_trajectory_advantages(rows, "leave_one_out") == [0.0, -0.5, 0.5]


def test_rewritten_history_makes_rows_with_same_advantage():
    several = result(transitions=[turn([1], [2]), turn([7], [8]), turn([7, 8, 9], [10])], trajectory_id=1, reward=0.0)
    rows = training_rows([[result(), several]], 100)
    assert rows.prompt_token_ids == [[1, 2], [1], [7]]
    assert rows.response_ids[1:] == [[2], [8, 9, 10]]
    assert rows.is_last_episode == [True, False, True]
    assert (rows.row_trajectory, rows.episode_nums) == ([0, 1, 1], [1, 2])
    assert rows.traj_idx == ["a-traj0", "a-traj1", "a-traj1"]
    assert repeat_for_rows(rows, compute_trajectory_advantages(rows)) == [0.5, -0.5, -0.5]


def test_overlong_row_is_truncated_and_masked():
    rows = training_rows([[result(), result("max_iterations_reached", trajectory_id=1)]], 3)
    assert rows.response_ids == [[3, 4, 5]] * 2
    assert rows.loss_masks == [[0, 0, 0]] * 2
    assert rows.finish_reasons == ["CONTEXT_WINDOW_EXCEEDED", "max_iterations_reached"]
    assert rows.rollout_logprobs is not None and len(rows.rollout_logprobs[0]) == 3


def test_log_probs_are_complete_or_null():
    without = result(transitions=[turn([1], [2], logprob=None)], trajectory_id=1)
    assert training_rows([[result(), without]], 100).rollout_logprobs is None


def test_weight_versions_cover_generated_tokens():
    versioned = result(transitions=[turn([1], [2], version=4), turn([1, 2, 9], [3], version=5)])
    assert training_rows([[versioned]], 100).weight_versions == [[4, -1, 5]]
    assert training_rows([[versioned, result(trajectory_id=1)]], 100).weight_versions is None


def test_duplicate_instance_ids_make_separate_groups():
    rows = training_rows([[result(reward=1.0)], [result(reward=0.0)]], 100)
    assert rows.groups == [0, 1]
    assert compute_trajectory_advantages(rows) == [0.0, 0.0]


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_missing_reward_differs_from_zero_reward(reward: float | None):
    rows = training_rows([[result(reward=reward), result(reward=1.0), result(reward=0.0)]], 100)
    assert rows.finish_reasons[0] == "error_evaluation"
    assert rows.failures[0] is not None and rows.failures[0].kind == "reward"
    assert rows.in_baseline == [False, True, True]
    assert compute_trajectory_advantages(rows) == [0.0, 0.5, -0.5]


def test_missing_token_ids_exclude_only_their_trajectory():
    rows = training_rows([[result(transitions=[turn([1], None)]), result()]], 100)
    assert (rows.loss_masks, rows.in_baseline) == ([[0], [1, 0, 1, 1]], [False, True])
    assert "transition 0 has no token ids" in rows.failures[0].message


def test_metrics_of_tools_and_groups():
    calls = [ToolCallRecord(name, {}, "", 0.1, 1) for name in ("python", "python", "finish")]
    groups = [[result(tool_calls=calls), result(tool_calls=calls[:1])], [result(reward=0.0)]]
    metrics = training_rows(groups, 100, profile_tools=True, metrics={"dispatcher/seconds": 3.0}).rollout_metrics
    found = {name.removeprefix("rollout_metrics/"): value for name, value in metrics.items()}
    assert (found["num_all_resolved"], found["num_none_resolved"], found["avg_turn_assistant"]) == (1, 1, 2)
    assert (found["tool_calls_total"], found["tool_calls_per_traj_max"], found["tool_calls_per_traj_min"]) == (4, 3, 0)
    assert (found["tool_calls_no_finish_total"], found["tool_name/python"]) == (3, 3)
    assert found["dispatcher/seconds"] == 3.0
