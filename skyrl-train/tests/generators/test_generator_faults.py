"""Errors of a user's own generator are recorded on the trajectory concerned; the batch continues without it."""

import math
from typing import Any

import pytest

from skyrl_train.config import GeneratorConfig, SamplingParams
from skyrl_train.generators.base import Failure, GeneratorOutput, TrajectoryID
from skyrl_train.rollouts.adapter import get_metrics_from_generator_output, to_generator_output, to_rollout_batch
from skyrl_train.rollouts.faults import TEMPLATE_TOKENS, LengthLimits, record_faults

NAN = math.nan
LIMITS = LengthLimits(max_input_length=4, max_generate_length=3, one_answer_a_sample=True)
LONGEST = 3 + TEMPLATE_TOKENS


def two(**changes) -> Any:
    """Two trajectories, of which the tests damage the first."""
    made = {
        "prompt_token_ids": [[1, 2], [1, 2]],
        "response_ids": [[5, 6], [7, 8]],
        "rewards": [[0.0, 1.0], [0.0, 0.5]],
        "loss_masks": [[1, 1], [1, 1]],
        "stop_reasons": ["stop", "stop"],
        "rollout_metrics": {"environment/turns": 1.0},
        "rollout_logprobs": [[-1.0, -2.0], [-1.0, -2.0]],
        "trajectory_ids": [TrajectoryID("p", 0), TrajectoryID("p", 1)],
        "weight_versions": [[7, 7], [7, 7]],
    }
    return GeneratorOutput(**(made | changes))


def checked(output: Any, limits: LengthLimits | None = None, num_trajectories: int = 2) -> Any:
    """Return the output as the trainer takes it, in columns again."""
    prompts = [TrajectoryID("p", number) for number in range(num_trajectories)]
    return to_generator_output(record_faults(to_rollout_batch(output, prompts), limits))


@pytest.mark.parametrize(
    "changes, failure",
    [
        ({"rewards": [[0.0, NAN], [0.0, 0.5]]}, Failure("reward", "must have finite numbers as rewards; got nan")),
        ({"rewards": [math.inf, 0.5]}, Failure("reward", "must have finite numbers as rewards; got inf")),
        ({"rewards": [None, 0.5]}, Failure("reward", "must have finite numbers as rewards; got None")),
        (
            {"rollout_logprobs": [[-1.0, -math.inf], [-1.0, -2.0]]},
            Failure("infrastructure", "must have finite numbers as log-probs; got -inf"),
        ),
        (
            {"prompt_token_ids": [[], [1, 2]]},
            Failure("infrastructure", "must have a prompt and a response; they have 0 and 2 tokens"),
        ),
        (
            {"prompt_token_ids": [[1] * 5, [1, 2]]},
            Failure("infrastructure", "has a prompt of 5 tokens; generator.max_input_length is 4"),
        ),
    ],
    ids=["nan", "inf", "none", "log-prob", "empty", "long prompt"],
)
def test_invalid_trajectory_is_named_and_masked(changes, failure):
    output = checked(two(**changes), LIMITS)
    assert output["failures"] == [Failure(failure.kind, f"trajectory p_0 {failure.message}"), None]
    assert output["loss_masks"] == [[0, 0], [1, 1]]
    assert output["rewards"][0] == [0.0, 0.0]
    assert output["stop_reasons"] == ["error", "stop"]
    assert output["rollout_logprobs"] == [[0.0, 0.0], [-1.0, -2.0]]
    assert 1 <= len(output["prompt_token_ids"][0]) <= 4
    assert output["rollout_metrics"][f"generate/num_failed/{failure.kind}"] == 1.0
    assert output["rollout_metrics"]["environment/turns"] == 1.0
    assert get_metrics_from_generator_output(output, ["p", "p"])["avg_score"] == 0.5


def with_response(length: int, **changes) -> Any:
    columns = {
        "response_ids": [[5] * length, [7, 8]],
        "rewards": [[1.0] * length, [0.0, 0.5]],
        "loss_masks": [[1] * length, [1, 1]],
        "rollout_logprobs": [[-1.0] * length, [-1.0, -2.0]],
        "weight_versions": [[7] * length, [7, 7]],
    }
    return two(**(columns | changes))


def test_response_over_limit_is_truncated_and_masked():
    assert checked(with_response(LONGEST), LIMITS)["failures"] == [None, None]

    output = checked(with_response(LONGEST + 1), LIMITS)
    assert output["failures"][0].message.startswith(
        "trajectory p_0 has a response of 20 tokens; max_generate_length is 3"
    )
    columns = ("response_ids", "rewards", "loss_masks", "rollout_logprobs", "weight_versions")
    assert [len(output[name][0]) for name in columns] == [LONGEST] * 5
    assert not any(output["loss_masks"][0])


def test_empty_response_becomes_single_masked_token():
    output = checked(with_response(0, rewards=[1.0, 0.5]))
    assert (output["response_ids"][0], output["loss_masks"][0], output["rewards"][0]) == ([0], [0], [0.0])


def test_conversation_may_fill_last_input_and_response_limits():
    sampling = SamplingParams(max_generate_length=3)

    def limits(**settings):
        config = GeneratorConfig(
            max_input_length=10, sampling_params=sampling, eval_sampling_params=sampling, **settings
        )
        return LengthLimits.of(config, sampling)

    assert limits(max_turns=1).max_response_length(4) == 3 + TEMPLATE_TOKENS
    assert limits(max_turns=2).max_response_length(4) == (10 - 4) + 3 + TEMPLATE_TOKENS
    turns = {"max_turns": 2, "step_wise_trajectories": True}
    assert limits(**turns).max_response_length(4) == 3 + TEMPLATE_TOKENS
    assert limits(**turns, merge_stepwise_output=True).max_response_length(4) == (10 - 4) + 3 + TEMPLATE_TOKENS


def test_log_prob_of_masked_token_may_be_non_finite():
    output = checked(two(rollout_logprobs=[[-1.0, NAN], [-1.0, -2.0]], loss_masks=[[1, 0], [1, 1]]), LIMITS)
    assert output["failures"] == [None, None]


def test_invalid_turn_fails_all_turns_of_trajectory():
    output = two(
        rewards=[[0.0, 1.0], [0.0, NAN]], trajectory_ids=[TrajectoryID("p", 0)] * 2, is_last_step=[False, True]
    )
    output = checked(output, num_trajectories=1)
    failure = Failure("reward", "trajectory p_0 must have finite numbers as rewards; got nan")
    assert output["failures"] == [failure, failure]
    assert output["loss_masks"] == [[0, 0], [0, 0]]
    assert output["rollout_metrics"]["generate/num_failed/reward"] == 1.0  # of trajectories, not of rows


def test_failed_trajectory_keeps_first_failure():
    earlier = Failure("tool", "no search server")
    output = checked(two(rewards=[[0.0, NAN], [0.0, 0.5]], failures=[earlier, None]))
    assert output["failures"] == [earlier, None]
    assert output["rewards"][0] == [0.0, 0.0]
