"""Scores and rollout metrics on batches that one can add up by hand."""

import math
from typing import Any

import pytest

from skyrl_train.errors import AllRolloutsFailedError
from skyrl_train.generators.base import Failure, GeneratorOutput, TrajectoryID
from skyrl_train.generators.utils import (
    concatenate_generator_outputs,
    get_metrics_from_generator_output,
    get_rollout_metrics,
    prepare_generator_input,
    validate_generator_output,
)
from skyrl_train.rollouts.collate import collate
from skyrl_train.rollouts.metrics import (
    check_not_all_failed,
    compute_rollout_metrics,
    compute_version_lag_metrics,
    estimate_sampling_entropy,
)
from skyrl_train.rollouts.types import RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup

FAILED = Failure("tool", "no search server")


def output_of(rewards, **changes) -> GeneratorOutput:
    responses = [[5] * len(reward) if isinstance(reward, list) else [5, 6] for reward in rewards]
    n = len(rewards)
    columns = {
        "prompt_token_ids": [[1]] * n,
        "response_ids": responses,
        "rewards": rewards,
        "loss_masks": [[1] * len(response) for response in responses],
        "stop_reasons": ["stop"] * n,
        "rollout_metrics": {},
        "rollout_logprobs": None,
    }
    return GeneratorOutput(**(columns | changes))  # pyright: ignore


@pytest.mark.parametrize(
    "rewards, expected",
    [
        ([1.0, 0.0, 0.0, 0.0], (0.25, 0.5, 0.25)),
        ([1.0, 1.0, -1.0, 0.0], (0.25, 0.5, 0.5)),
        # per token: the sum decides, wherever in the trajectory the reward stands
        ([[1.0, 0.0], [0.0, 0.0], [0.0, -1.0], [0.5, -0.5]], (0.0, 0.5, 0.25)),
    ],
)
def test_scores_are_computed_for_two_prompts_with_two_samples(rewards, expected):
    scores = get_metrics_from_generator_output(output_of(rewards), ["a", "a", "b", "b"])
    assert (scores["avg_score"], scores["pass_at_n"], scores["mean_positive_reward"]) == expected


def test_failed_trajectories_are_excluded_from_scores():
    output = output_of([1.0, 0.0, 0.0, 0.0], failures=[None, FAILED, FAILED, FAILED])
    scores = get_metrics_from_generator_output(output, ["a", "a", "b", "b"])
    assert scores == {"avg_score": 1.0, "pass_at_n": 1.0, "mean_positive_reward": 1.0}
    everything_failed = output_of([0.0], failures=[FAILED])
    assert set(get_metrics_from_generator_output(everything_failed, ["a"]).values()) == {None}


@pytest.mark.parametrize("rewards, uids", [([], []), ([1.0], ["a", "b"])])
def test_scores_require_uid_per_trajectory(rewards, uids):
    with pytest.raises(ValueError):
        get_metrics_from_generator_output(output_of(rewards), uids)


def test_rollout_metrics_are_computed_for_three_trajectories():
    metrics = get_rollout_metrics(
        [[1], [1, 2, 3], [1, 2, 3, 4, 5]],
        [[0.0], [0.0, 0.0, 1.0], [0.0] * 5],
        [{"turns": 1}, {"turns": 3}, {"turns": 100}],
        ["gsm8k", "gsm8k", "gsm8k"],
        stop_reasons=["stop", "length", "error"],
        failures=[None, None, FAILED],
    )
    assert metrics == {
        "generate/min_num_tokens": 1.0,
        "generate/max_num_tokens": 3.0,
        "generate/avg_num_tokens": 2.0,
        "generate/std_num_tokens": 1.0,
        "generate/avg_tokens_non_zero_rewards": 3.0,
        "generate/avg_tokens_zero_rewards": 1.0,
        "generate/repetition": 0.0,
        "generate/stop_reason/stop": pytest.approx(1 / 3),
        "generate/stop_reason/length": pytest.approx(1 / 3),
        "generate/stop_reason/error": pytest.approx(1 / 3),
        "generate/num_failed/model": 0.0,
        "generate/num_failed/tool": 1.0,
        "generate/num_failed/environment": 0.0,
        "generate/num_failed/reward": 0.0,
        "generate/num_failed/infrastructure": 0.0,
        "generate/failed_share": pytest.approx(1 / 3),
        "environment/turns": 2.0,
    }


def test_failed_share_is_computed_by_environment():
    metrics = get_rollout_metrics(
        [[1]] * 4, [0.0] * 4, [None] * 4, ["a", "b", "b", "a"], failures=[None, FAILED, FAILED, FAILED]
    )
    shares = {name: value for name, value in metrics.items() if "failed_share" in name}
    prefix = "generate/failed_share"
    assert shares == {prefix: 0.75, f"{prefix}/a": 0.5, f"{prefix}/b": 1.0}


@pytest.mark.parametrize(
    ("response", "share"),
    [
        ([1, 2, 3] * 100, 1 - 3 / 293),
        (list(range(300)), 0.0),
        ([7] * 63, 0.0),  # too short to tell
        ([*range(200), *[7] * 800], 1 - 1 / 505),  # the last 512 tokens
    ],
)
def test_repetition_is_share_of_repeated_ngrams(response: list[int], share: float):
    found = get_rollout_metrics([response, list(range(100))], [0.0, 0.0])["generate/repetition"]
    assert found == pytest.approx(share / 2)


def test_distinct_prompts_are_counted_by_tokens():
    def trajectory(uid: str, prompt: list[int], repetition: int = 0) -> Trajectory:
        return Trajectory(TrajectoryID(uid, repetition), [TrainingSample(prompt, [5], [1], [1.0])], env_class="gsm8k")

    batch = [
        trajectory("a", [1]),
        trajectory("a", [1], 1),
        trajectory("b", [1]),
        trajectory("c", [2]),
        trajectory("d", [2]),
    ]
    assert compute_rollout_metrics(batch)["generate/distinct_prompts_share"] == 0.5


def test_sampled_entropy_counts_every_generated_token_once():
    """Three tokens of 1.5 nats and one of 0, none of which trains: 4.5 / 4. The context token is left out."""

    def trajectory(log_probs, lengths, failure=None):
        row = TrainingSample([1], [5] * 3, [0] * 3, [0.0] * 3, log_probs)
        return Trajectory(TrajectoryID("a", 0), [row], failure=failure, env_class="gsm8k", turn_lengths=lengths)

    two_turns, one_turn = trajectory([-1.5, 0.0, -1.5], [1, 1]), trajectory([0.0, -1.5], [2])
    assert estimate_sampling_entropy([two_turns, one_turn, trajectory([-9.0] * 3, [3], FAILED)]) == 4.5 / 4
    assert compute_rollout_metrics([two_turns])["generate/entropy"] == 1.5
    assert estimate_sampling_entropy([two_turns, trajectory(None, [3])]) is None
    assert "generate/entropy" not in compute_rollout_metrics([trajectory([], [])])


def test_missing_retry_count_means_zero_retries():
    sample = TrainingSample([1], [5], [1], [1.0])
    trajectory = Trajectory(TrajectoryID("a", 0), [sample], env_class="gsm8k")
    assert compute_rollout_metrics([trajectory])["generate/num_retries"] == 0.0


def test_no_metric_is_ever_nan():
    metrics = get_rollout_metrics([[1]], [0.0], [{"x": math.nan}], ["gsm8k"], stop_reasons=["error"], failures=[FAILED])
    assert all(math.isfinite(value) for value in metrics.values())
    metrics = get_rollout_metrics([[1]], [0.0], [{"x": math.nan}], ["gsm8k"])
    assert all(math.isfinite(value) for value in metrics.values()) and "environment/x" not in metrics


def test_outputs_are_joined_in_order_and_metrics_recomputed():
    first = output_of([[1.0]], rollout_metrics={"environment/turns": 1.0, "generate/num_retries": 2.0})
    second = output_of([[0.0] * 3] * 3, rollout_metrics={"environment/turns": 5.0, "generate/num_retries": 1.0})
    joined = concatenate_generator_outputs([first, second])
    assert [len(ids) for ids in joined["response_ids"]] == [1, 3, 3, 3]
    assert joined["rewards"] == [[1.0], [0.0] * 3, [0.0] * 3, [0.0] * 3]
    assert joined["rollout_logprobs"] is None
    assert joined["rollout_metrics"] is not None
    assert joined["rollout_metrics"]["generate/avg_num_tokens"] == 2.5
    assert joined["rollout_metrics"]["environment/turns"] == 4.0  # (1 + 3 * 5) / 4
    assert joined["rollout_metrics"]["generate/num_retries"] == 3.0


def test_mixed_presence_of_log_probs_is_refused():
    samples = [TrainingSample([1], [5], [1], [0.0], log_probs) for log_probs in ([-1.0], None)]
    trajectories = [Trajectory(TrajectoryID("p", n), [sample]) for n, sample in enumerate(samples)]
    with pytest.raises(ValueError, match="1 of 2 samples"):
        collate(RolloutBatch([TrajectoryGroup("p", trajectories)]), Padding(), step=1)  # type: ignore[arg-type]


def test_batch_and_metrics_report_weight_version_of_each_token():
    versions = [[7, -1, 9], None, [2]]
    samples = [
        TrainingSample([1], [5] * length, [1] * length, [0.0] * length, None, own)
        for length, own in zip((3, 2, 1), versions, strict=True)
    ]
    failures = [None, None, FAILED]
    trajectories = [
        Trajectory(TrajectoryID("p", n), [sample], "stop", failure)
        for n, (sample, failure) in enumerate(zip(samples, failures, strict=True))
    ]
    batch = collate(RolloutBatch([TrajectoryGroup("p", trajectories)]), Padding(), step=1)  # type: ignore[arg-type]
    assert batch.tensor("weight_versions").tolist() == [[7, -1, 9], [-1, -1, -1], [2, -1, -1]]
    assert compute_version_lag_metrics(trajectories, 10) == {
        "generate/weight_version_lag_mean": 2.0,  # of 7 and 9: neither context tokens nor failed trajectories count
        "generate/weight_version_lag_max": 3.0,
    }
    assert compute_version_lag_metrics(trajectories[1:], 10) == {}


class Padding:
    """All of a tokenizer that a batch needs."""

    pad_token_id = 0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"response_ids": [], "rewards": []}, "No outputs generated"),
        ({"response_ids": [[5]]}, r"Mismatch between prompts \(2\) and responses \(1\)"),
        ({"rewards": [1.0]}, "response_ids"),
        ({"loss_masks": [[1], [1]]}, "Response ids and loss masks must have the same length; trajectory 0: 2 and 1"),
        ({"rewards": [[1.0], [1.0]]}, "Token rewards and response ids must have the same length"),
        ({"rewards": [1.0, [1.0, 0.0]]}, "not a mix of both"),
        ({"rollout_logprobs": [[0.0, 0.0], [0.0]]}, "Response ids and rollout logprobs must have the same length"),
        ({"failures": [None]}, "failures length"),
    ],
)
def test_inconsistent_output_is_refused(changes, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        validate_generator_output(2, GeneratorOutput(**{**output_of([1.0, 0.0]), **changes}))


def test_each_prompt_repeats_n_times_consecutively():
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "env_class": None, "env_extras": {"x": 1}, "uid": "0"},
        {"prompt": [{"role": "user", "content": "b"}], "env_class": "multiply", "env_extras": {}, "uid": "1"},
    ]
    batch: Any
    batch, uids = prepare_generator_input(rows, 2, {"max_tokens": 3}, "gsm8k", "train", 7)
    assert uids == ["0", "0", "1", "1"]
    assert batch["env_classes"] == ["gsm8k", "gsm8k", "multiply", "multiply"]
    assert [t.to_string() for t in batch["trajectory_ids"]] == ["0_0", "0_1", "1_0", "1_1"]
    assert batch["batch_metadata"].global_step == 7


def test_failed_batch_error_names_most_common_cause():
    def failed_by(*failures: Failure | None) -> list[Trajectory]:
        return [Trajectory(TrajectoryID("p", n), [], failure=failure) for n, failure in enumerate(failures)]

    rare, common = Failure("tool", "no server"), Failure("environment", "my bug")
    with pytest.raises(AllRolloutsFailedError, match=r"environment: my bug$"):
        check_not_all_failed(failed_by(rare, common, common), "step 4 failed")
    check_not_all_failed(failed_by(rare, None), "step 4 failed")
    check_not_all_failed([], "step 4 failed")


def test_means_over_empty_sets_are_absent():
    metrics = get_rollout_metrics([[1, 2], [3]], [0.0, 0.0], failures=[None, FAILED])
    assert metrics["generate/avg_tokens_zero_rewards"] == 2.0 and "generate/avg_tokens_non_zero_rewards" not in metrics
    assert "generate/avg_num_tokens" not in get_rollout_metrics([[3]], [0.0], failures=[FAILED])
