"""Batch preparation, by numbers that can be checked on paper."""

from typing import Any

import pytest
import torch

from skyrl_train import batch_preparation
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import RolloutGapError
from skyrl_train.training_batch import TrainingInputBatch

NAN = float("nan")


def settings(algorithm: dict[str, Any] | None = None, **generator: Any) -> SkyRLConfig:
    return SkyRLConfig.from_dict({"trainer": {"algorithm": algorithm or {}}, "generator": generator})


def batch_of(
    lengths: list[int], rewards: list[float], uids: list[str], valid: list[bool] | None = None, **columns: Any
) -> TrainingInputBatch:
    """A row for each length; every response token is an action, and the reward stands on the last one. A failed row
    has garbage where its numbers would be."""
    valid = valid or [True] * len(lengths)
    response_mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    reward_tensor = torch.zeros(response_mask.shape)
    for row, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        reward_tensor[row, length - 1] = reward
    metadata = {"uids": uids, "valid": valid, "response_length": max(lengths)} | columns.pop("metadata", {})
    return TrainingInputBatch(
        response_mask=response_mask,
        loss_mask=response_mask.float() * torch.tensor(valid)[:, None],
        rewards=reward_tensor,
        metadata=metadata,
        **columns,
    )


def prepare(batch: TrainingInputBatch, cfg: SkyRLConfig, kl_coefficient: float = 0.0) -> tuple[Any, dict[str, float]]:
    return batch_preparation.prepare_training_batch(batch, cfg, kl_coefficient)


def first_tokens(batch: TrainingInputBatch, name: str = "advantages") -> list[float]:
    return batch.tensor(name)[:, 0].tolist()


def test_failed_rollout_is_excluded_from_baseline():
    """Rewards 1, 0, 0 and one that failed: their mean is 1/3 and their standard deviation sqrt(1/3)."""
    batch = batch_of([2, 1, 2, 2], [1, 0, 0, NAN], ["a"] * 4, [True, True, True, False])
    prepared, metrics = prepare(batch, settings())
    assert first_tokens(prepared) == pytest.approx([1.1547, -0.57735, -0.57735, 0.0], abs=1e-4)
    assert prepared["advantages"][1].tolist() == pytest.approx([-0.57735, 0.0], abs=1e-4)  # 0 after the response
    assert metrics["loss/avg_final_rewards"] == pytest.approx(1 / 3)
    assert metrics["loss/share_of_rows_trained"] == 0.75
    assert metrics["loss/num_lone_samples"] == 0


def test_rollout_gap_beyond_staleness_ends_run():
    """Temperatures 1.0 and 0.3 put 6 nats between the log-probs of each token."""
    own = torch.full((2, 2), -9.0)
    batch = batch_of([2, 2], [1, 0], ["a"] * 2, action_log_probs=own, rollout_logprobs=own + 6)
    with pytest.raises(RolloutGapError, match=r"trainer\.algorithm\.max_rollout_gap=5"):
        prepare(batch, settings())
    _, metrics = prepare(batch, settings({"max_rollout_gap": None}))
    assert metrics["policy/rollout_train_logprobs_abs_diff_mean"] == 6


def test_single_successful_sample_of_group_is_masked():
    """GRPO's rule for a group of one would give it its whole reward as advantage."""
    batch = batch_of([1] * 4, [5, 0, 1, 0], ["a", "a", "b", "b"], [True, False, True, True])
    prepared, metrics = prepare(batch, settings())
    assert prepared["loss_mask"].tolist() == [[0.0], [0.0], [1.0], [1.0]]
    assert metrics["loss/num_lone_samples"] == 1
    prepared, _ = prepare(
        batch, settings({"advantage_estimator": "reinforce++"})
    )  # which compares with the whole batch
    assert prepared["loss_mask"].tolist() == [[1.0], [0.0], [1.0], [1.0]]


def test_batch_without_trained_tokens_has_finite_advantages_and_metrics():
    for valid in ([False, False], [True, True]):
        batch = batch_of([2, 1], [1, 0], ["a", "a"], valid)
        batch["loss_mask"] = torch.zeros(2, 2)
        prepared, metrics = prepare(batch, settings({"advantage_batch_normalize": True, "zero_variance_filter": True}))
        assert torch.isfinite(prepared["advantages"]).all()
        assert metrics["loss/share_of_rows_trained"] == 0
        assert all(value == value for value in metrics.values())
        assert batch_preparation.loss_weights(prepared, [[0, 1]], "token_mean").sum() == 0


@pytest.mark.parametrize(
    "length, penalty",
    [
        (4, 0.0),  # up to the buffer: none
        (6, 0.0),
        (7, 0.5),  # a quarter of the buffer of 4: a quarter of the factor of 2
        (9, 1.5),
        (10, 2.0),  # the limit
        (12, 2.0),  # over it: never more
    ],
)
def test_overlong_penalty_rises_linearly_over_buffer(length: int, penalty: float):
    """DAPO, equation 13, with a limit of 10 tokens."""
    cfg = settings({"overlong_buffer": {"len": 4, "penalty_factor": 2.0}}, sampling_params={"max_generate_length": 10})
    batch = batch_of([length, 12], [1.0, 0.0], ["a", "a"])
    prepared, metrics = batch_preparation.penalize_overlong(batch, cfg.trainer.algorithm, cfg.generator)
    assert prepared["rewards"][0, length - 1] == 1.0 - penalty
    assert prepared["rewards"][0].sum() == 1.0 - penalty
    assert metrics["loss/overlong_share"] == (0.5 if penalty == 0 else 1.0)
    assert batch["rewards"][0].sum() == 1.0, "the input batch is unchanged"


@pytest.mark.parametrize(
    ("counts", "prompt", "length", "penalty"),
    [
        # DAPO's figures: prompts of up to 2,048 tokens, responses of up to 8,192, a buffer of 4,096.
        ("response", 150, 4096, 0.0),
        ("response", 150, 6144, 0.5),
        ("response", 150, 8192, 1.0),
        ("context", 150, 5994, 0.0),  # 10,240 - 4,096 - 150
        ("context", 150, 5995, 1 / 4096),
        ("context", 150, 8192, (8192 - 5994) / 4096),  # 0.54, the most that a short prompt's answer can lose
        ("context", 2048, 8192, 1.0),
    ],
)
def test_overlong_penalty_counts_response_or_full_context(counts, prompt, length, penalty):
    algorithm = {"overlong_buffer": {"len": 4096, "counts": counts}}
    cfg = settings(algorithm, sampling_params={"max_generate_length": 8192}, max_input_length=2048)
    attention_mask = torch.zeros(1, 2048 + length, dtype=torch.long)
    attention_mask[0, 2048 - prompt :] = 1
    batch = batch_of([length], [1.0], ["a"], attention_mask=attention_mask)
    prepared, _ = batch_preparation.penalize_overlong(batch, cfg.trainer.algorithm, cfg.generator)
    assert prepared["rewards"][0, length - 1].item() == pytest.approx(1.0 - penalty, abs=1e-6)


def test_kl_in_reward_is_subtracted_per_unmasked_token():
    """k1 with log-probs -1 and -2 against -1.5 and -3: 0.5 and 1, at a coefficient of 0.1."""
    cfg = settings({"use_kl_in_reward": True, "use_kl_loss": False, "kl_estimator_type": "k1"})
    batch = batch_of(
        [2, 1, 2],
        [1, 1, 1],
        ["a", "a", "a"],
        [True, True, False],
        action_log_probs=torch.tensor([[-1.0, -2.0], [-1.0, NAN], [NAN, NAN]]),
        base_action_log_probs=torch.tensor([[-1.5, -3.0], [-1.0, NAN], [NAN, float("inf")]]),
    )
    prepared, metrics = batch_preparation.subtract_kl(batch, cfg.trainer.algorithm, 0.1)
    torch.testing.assert_close(prepared["rewards"], torch.tensor([[-0.05, 0.9], [1.0, 0.0], [0.0, 1.0]]))
    assert metrics["loss/avg_kl"] == pytest.approx((0.75 + 0.0) / 2), "over the rows that train"
    assert metrics["loss/avg_kl_max"] == pytest.approx((1.0 + 0.0) / 2)
    prepared, metrics = batch_preparation.subtract_kl(batch, cfg.trainer.algorithm, -3.0)
    assert torch.equal(prepared["rewards"], batch["rewards"]) and metrics["loss/kl_loss_coef"] == 0


def test_zero_variance_filter_masks_groups_with_equal_scores():
    batch = batch_of([1] * 6, [1, 1, 0, 1, 0, 0], ["a", "a", "b", "b", "c", "c"], [True] * 5 + [False])
    prepared, metrics = prepare(batch, settings({"zero_variance_filter": True, "advantage_estimator": "reinforce++"}))
    assert prepared["loss_mask"].flatten().tolist() == [0, 0, 1, 1, 1, 0]  # c: one is left, so nothing is the same
    assert metrics["loss/zero_variance_share"] == pytest.approx(1 / 3)


def test_zero_variance_filter_ignores_kl_penalty():
    """The penalty differs from sample to sample, so with it no group would ever be filtered."""
    cfg = settings({"zero_variance_filter": True, "use_kl_in_reward": True, "use_kl_loss": False})
    log_probs = torch.tensor([[-1.0], [-2.0]])
    batch = batch_of([1, 1], [1, 1], ["a", "a"], action_log_probs=log_probs, base_action_log_probs=log_probs * 2)
    prepared, _ = prepare(batch, cfg, 0.5)
    assert prepared["rewards"].std() > 0
    assert prepared["loss_mask"].sum() == 0


def test_correction_mask_removes_tokens_from_loss_and_denominators():
    """Ratios 1 and e^2 with a token threshold of 5: the second token goes; the weights are the ratios up to 2."""
    correction = {"token_mask_is_threshold_high": 5.0, "tis_ratio_type": "token", "token_tis_ratio_clip_high": 2.0}
    batch = batch_of(
        [2, 1],
        [1, 0],
        ["a", "a"],
        action_log_probs=torch.tensor([[-1.0, -1.0], [-1.0, NAN]]),
        rollout_logprobs=torch.tensor([[-1.0, -3.0], [-1.5, NAN]]),
    )
    prepared, metrics = prepare(batch, settings({"off_policy_correction": correction}))
    assert prepared["loss_mask"].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert prepared["off_policy_weights"][:, 0].tolist() == pytest.approx([1.0, 1.64872], abs=1e-4)
    assert batch_preparation.loss_weights(prepared, [[0, 1]], "token_mean").tolist() == [[0.5, 0.0], [0.5, 0.0]]
    assert metrics["policy/rollout_train_logprobs_abs_diff_max"] == pytest.approx(2.0), "seen before the mask"
    assert metrics["policy/loss_metrics/token_mask_over_high_ratio"] == pytest.approx(1 / 3)


def test_correction_mask_does_not_split_turns():
    """One turn of three tokens, whose middle one is too far off: the reward at its end is still that of all of it."""
    batch = batch_of(
        [3, 3],
        [1, 0],
        ["a", "a"],
        action_log_probs=torch.tensor([[-1.0, -1.0, -1.0]] * 2),
        rollout_logprobs=torch.tensor([[-1.0, -3.0, -1.0]] * 2),
    )
    algorithm = {
        "advantage_estimator": "turn_grpo",
        "grpo_norm_by_std": False,
        "off_policy_correction": {"token_mask_is_threshold_high": 5.0},
        "gamma": 0.5,
    }
    prepared, _ = prepare(batch, settings(algorithm))
    assert prepared["loss_mask"].tolist() == [[1.0, 0.0, 1.0]] * 2
    assert prepared["advantages"].tolist() == [[0.5] * 3, [-0.5] * 3]


def test_normalized_advantages_have_mean_0_and_std_1_over_loss_mask():
    batch = batch_of([2, 1, 2], [3, 0, 0], ["a", "a", "a"], [True, True, False])
    prepared, _ = prepare(batch, settings({"advantage_batch_normalize": True, "grpo_norm_by_std": False}))
    trained = prepared["advantages"][prepared["loss_mask"] > 0]
    assert trained.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert trained.std().item() == pytest.approx(1.0, abs=1e-5)
    assert prepared["advantages"][prepared["loss_mask"] == 0].abs().sum() == 0


def test_maxrl_counts_groups_with_negative_mean():
    batch = batch_of([1] * 4, [-1, 0, 0, 1], ["a", "a", "b", "b"])
    prepared, metrics = prepare(batch, settings({"advantage_estimator": "maxrl"}))
    assert first_tokens(prepared) == [0, 0, -1, 1]
    assert metrics["loss/maxrl_negative_groups"] == 1


# ---- a row is a turn


def turns_batch(estimator: str = "grpo", **changes: Any) -> tuple[TrainingInputBatch, dict[str, float]]:
    """Two trajectories of one prompt: the first of two turns (3 and 1 tokens, rewards 0 and 1), the second of one turn
    (2 tokens, reward 0)."""
    batch = batch_of(
        [3, 1, 2],
        [0, 1, 0],
        ["a", "a", "a"],
        is_last_step=torch.tensor([False, True, True]),
        metadata={"trajectory_ids": ["a_0", "a_0", "a_1"]},
        **changes,
    )
    return prepare(batch, settings({"advantage_estimator": estimator, "grpo_norm_by_std": False}))


def test_each_turn_has_trajectory_advantage_over_turn_length():
    """Scores 1 and 0, so +0.5 and -0.5. (Copied from the last turn's tokens, the first turn's second and third token
    would have 0.)"""
    prepared, metrics = turns_batch()
    expected = [[0.5, 0.5, 0.5], [0.5, 0.0, 0.0], [-0.5, -0.5, 0.0]]
    assert prepared["advantages"].tolist() == expected
    assert prepared["returns"].tolist() == expected
    assert metrics["loss/avg_final_rewards"] == 0.5, "of trajectories, not of turns"


def test_turn_grpo_compares_turns_of_equal_position():
    """The returns of the first turns are 1 and 0; no other trajectory has a second turn to compare with."""
    prepared, _ = turns_batch("turn_grpo")
    assert prepared["advantages"].tolist() == [[0.5, 0.5, 0.5], [0.0, 0.0, 0.0], [-0.5, -0.5, 0.0]]


def test_turns_have_score_of_trajectory():
    batch = batch_of(
        [1] * 4,
        [1, -1, 0, 3],
        ["a", "a", "a", "b"],
        [True, True, True, False],
        metadata={"trajectory_ids": ["a_0", "a_0", "a_1", "b_0"]},
    )
    assert batch_preparation.trajectory_scores(batch) == [0.0, 0.0, 0.0, None]
    prepared, metrics = prepare(batch, settings({"zero_variance_filter": True}))
    assert prepared["loss_mask"].sum() == 0, "1 - 1 and 0 are the same score"
    assert metrics["loss/zero_variance_share"] == 1.0, "b: everything failed"


def test_turns_of_same_trajectory_are_not_compared():
    """The others failed: there is no difference to look for, so nothing is filtered."""
    ids = {"trajectory_ids": ["a_0", "a_0", "a_1"]}
    batch = batch_of([1, 1, 1], [0, 1, 0], ["a"] * 3, [True, True, False], metadata=ids)
    prepared, _ = prepare(batch, settings({"zero_variance_filter": True, "advantage_estimator": "token_reward"}))
    assert prepared["loss_mask"].flatten().tolist() == [1, 1, 0]


# ---- mini-batches and weights


def test_mini_batches_keep_prompts_together_for_any_number_of_rows():
    uids = ["a", "b", "b", "a", "c", "d", "d", "d"]
    assert batch_preparation.mini_batches_of_prompts(uids, 2) == [[0, 3, 1, 2], [4, 5, 6, 7]]
    assert batch_preparation.mini_batches_of_prompts(uids, 3) == [[0, 3, 1, 2, 4], [5, 6, 7]]


@pytest.mark.parametrize(
    "reduction, expected",
    [
        # mini-batch 1: rows of 3 and 1 tokens of prompts a and b; mini-batch 2: a row of 2 tokens
        ("token_mean", [1 / 4, 1 / 4, 1 / 2]),
        ("sequence_mean", [1 / 6, 1 / 2, 1 / 2]),
        ("seq_mean_token_sum_norm", [1 / 20, 1 / 20, 1 / 10]),
        ("prompt_mean", [1 / 6, 1 / 2, 1 / 2]),
    ],
)
def test_loss_weights_follow_reduction_within_each_mini_batch(reduction: Any, expected: list[float]):
    batch = batch_of([3, 1, 2], [0, 0, 0], ["a", "b", "c"])
    weights = batch_preparation.loss_weights(batch, [[0, 1], [2]], reduction, max_seq_len=10)
    assert first_tokens(TrainingInputBatch(weights=weights), "weights") == pytest.approx(expected)
    assert weights[batch["loss_mask"] == 0].abs().sum() == 0


def test_prompt_mean_weights_prompts_equally_for_any_number_of_turns():
    """Prompt a has rows of 3 and 1 tokens, b one of 2: each prompt's weights are a half in all."""
    batch = batch_of([3, 1, 2], [0, 0, 0], ["a", "a", "b"])
    assert batch_preparation.loss_weights(batch, [[0, 1, 2]], "prompt_mean").sum(dim=1).tolist() == pytest.approx(
        [3 / 8, 1 / 8, 1 / 2]
    )


@pytest.mark.parametrize(
    ("reduction", "of_rows"), [("sequence_mean", [3 / 8, 1 / 8, 1 / 2]), ("seq_mean_token_sum_norm", [0.15, 0.05, 0.1])]
)
def test_trajectory_branches_count_as_single_sequence(reduction: Any, of_rows: list[float]):
    """Trajectory a_0 has branches of 3 and 1 tokens, b_0 is one row of 2: half of the loss each, or a divisor of 2."""
    batch = batch_of([3, 1, 2], [0, 0, 0], ["a", "a", "b"])
    batch.metadata["trajectory_ids"] = ["a_0", "a_0", "b_0"]
    weights = batch_preparation.loss_weights(batch, [[0, 1, 2]], reduction, max_seq_len=10)
    assert weights.sum(dim=1).tolist() == pytest.approx(of_rows)


def test_token_reward_advantages_stay_per_token_where_turns_are_rows():
    batch = batch_of([2, 1], [3, 1], ["a", "a"], metadata={"trajectory_ids": ["a_0", "a_0"]})
    prepared, _ = prepare(batch, settings({"advantage_estimator": "token_reward"}))
    assert prepared["advantages"].tolist() == [[0.0, 3.0], [1.0, 0.0]]
