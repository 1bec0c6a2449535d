"""The loss and the gradient of a mini-batch are its own: no split over ranks or micro-batches changes them."""

from typing import Any

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.training_batch import TrainingInputBatch

SPLITS = {
    f"{num_ranks} x {micro_size}, {'packed' if packing else 'padded'}": (
        num_ranks,
        dict(micro_size=micro_size, use_sample_packing=packing),
    )
    for num_ranks in (1, 2)
    for micro_size in (1, 2, 8)
    for packing in (True, False)
} | {
    f"{num_ranks} x {budget} tokens": (num_ranks, dict(max_tokens_per_microbatch=budget))
    for num_ranks in (1, 2)
    for budget in (1, 30, 10_000)
}
FEW_SPLITS = ("1 x 8, packed", "2 x 2, padded", "2 x 30 tokens")
NOT_A_NUMBER, INFINITE = float("nan"), float("inf")


def steps_of(learners: Any, config: Any, batch: TrainingInputBatch, splits: Any, unit: int = 1, **settings: Any) -> Any:
    """The same step, divided in each of these ways."""
    return {
        split: learners.step("policy", config(**settings, **SPLITS[split][1]), batch, SPLITS[split][0], unit=unit)
        for split in splits
    }


def assert_same(steps: dict[str, Any], batch: TrainingInputBatch) -> Any:
    """The same to 1e-5, whatever the split. Returns the first."""
    kept = batch.tensor("loss_mask") > 0
    expected = next(iter(steps.values()))
    assert expected.grad_norm > 0.001
    for split, step in steps.items():
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), split
        torch.testing.assert_close(step.before[kept], expected.before[kept], atol=1e-5, rtol=0, msg=split)
        assert step.sums.keys() == expected.sums.keys(), split
        for name, value in expected.sums.items():
            assert step.sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (split, name)
        if expected.selected is not None:
            assert torch.equal(step.selected, expected.selected), split
        for name, weight in expected.weights.items():
            # The first Adam step is lr * sign(g) where g is not tiny: compare what is not at that edge.
            assert (step.weights[name] - weight).abs().median() < 1e-5, (split, name)
    return expected


@pytest.fixture
def shifted_batch(ragged_batch: Any) -> TrainingInputBatch:
    """Make a batch as if the policy had moved since the old log-probs, with all columns that a loss may read."""
    batch = ragged_batch(columns=["shift", "rollout_logprobs"])
    batch["shift"] = batch.tensor("shift") / 5
    batch["rollout_logprobs"] = batch.tensor("rollout_logprobs") / 5 - 4
    generator = torch.Generator().manual_seed(0)
    for name in ("token_noise", "off_policy_weights"):
        batch[name] = torch.rand(batch.tensor("shift").shape, generator=generator)
    return batch


@pytest.mark.parametrize(
    "reduction, splits",
    [
        *((name, FEW_SPLITS) for name in ("token_mean", "prompt_mean")),
        *(
            pytest.param(name, FEW_SPLITS, marks=pytest.mark.slow)
            for name in ("sequence_mean", "seq_mean_token_sum_norm")
        ),
        pytest.param("token_mean", SPLITS, marks=pytest.mark.full, id="token_mean, every split"),
    ],
)
def test_loss_and_gradient_are_independent_of_split(learners, config, shifted_batch, reduction, splits):
    steps = steps_of(learners, config, shifted_batch, splits, algorithm=dict(loss_reduction=reduction))
    sums = assert_same(steps, shifted_batch).sums
    assert sums["token/policy_kl"] > 0
    assert sums["token/clip_ratio"] > 0
    assert sums["max/ratio_deviation"] > 0.1


@pytest.mark.parametrize("num_rows", [1, 3, pytest.param(13, marks=pytest.mark.slow)])
def test_ranks_with_uneven_rows_agree_with_single_process(learners, config, ragged_batch, num_rows):
    batch = ragged_batch(num_rows)
    steps = steps_of(learners, config, batch, [*FEW_SPLITS, "2 x 1, packed", "2 x 1 tokens"])
    assert assert_same(steps, batch).sums["num_tokens"] == batch.tensor("loss_mask").sum()


@pytest.mark.parametrize("split", ["1 x 1, packed", "1 x 8, padded", "2 x 2, packed", "2 x 30 tokens"])
def test_first_ratio_is_exactly_1(learners, config, ragged_batch, split):
    [step] = steps_of(learners, config, ragged_batch(13), [split]).values()
    assert step.sums["max/ratio_deviation"] == 0.0
    assert step.sums["token/ratio"] == step.sums["num_tokens"]
    assert step.sums["token/clip_ratio"] == 0.0


def test_single_update_needs_no_separate_old_log_prob_forward(learners, config, ragged_batch):
    batch = ragged_batch(13)
    staged = learners.step("policy", config(), batch, 2)
    own = learners.step("policy", config(), batch, 2, stage_old=False)
    kept = batch.tensor("loss_mask") > 0
    assert torch.equal(own.before[kept], staged.before[kept])
    assert own.sums == staged.sums
    assert own.grad_norm == staged.grad_norm
    assert all(torch.equal(own.weights[name], weight) for name, weight in staged.weights.items())


@pytest.mark.parametrize("packing", [True, False])
def test_values_at_padding_are_ignored(learners, config, shifted_batch, packing):
    polluted = TrainingInputBatch(dict(shifted_batch), metadata=shifted_batch.metadata)
    padding, masked = polluted.tensor("attention_mask") == 0, polluted.tensor("loss_mask") == 0
    polluted["sequences"] = torch.where(padding, 63, polluted.tensor("sequences"))
    for name, garbage in {
        "advantages": NOT_A_NUMBER,
        "shift": INFINITE,
        "rollout_logprobs": -INFINITE,
        "off_policy_weights": NOT_A_NUMBER,
    }.items():
        polluted[name] = torch.where(masked, garbage, polluted.tensor(name))
    cfg = config(use_sample_packing=packing)
    batches = {"clean": shifted_batch, "polluted": polluted}
    assert_same({name: learners.step("policy", cfg, batch) for name, batch in batches.items()}, shifted_batch)


@pytest.mark.first_case
@pytest.mark.parametrize("loss", PolicyLossRegistry.list_available())
def test_every_loss_is_independent_of_split(learners, config, shifted_batch, loss):
    algorithm: dict[str, Any] = dict(policy_loss_type=loss, clip_cov=dict(clip_ratio=0.1, clip_cov_lb=0.1))
    unit = 1
    if loss == "dpo":  # pairs: both rows of one must have answers
        algorithm["loss_reduction"], unit = "sequence_mean", 2
        shifted_batch = shifted_batch.rows(torch.tensor([0, 1, 2, 3, 6, 7, 8, 9, 10, 11]))
    expected = assert_same(
        steps_of(learners, config, shifted_batch, FEW_SPLITS[::2], unit, algorithm=algorithm), shifted_batch
    )
    if expected.selected is not None:
        num_tokens = int(shifted_batch.tensor("loss_mask").sum())
        assert expected.selected.sum() == int(num_tokens * {"clip_cov": 0.1, "kl_cov": 0.2}[loss])


def test_expert_load_balancing_loss_covers_full_mini_batch(learners, config, ragged_batch, save_mixture, tmp_path):
    batch = ragged_batch(3)
    policy = {"model": {"path": save_mixture(tmp_path / "mixture", scale=3.0)}}
    steps = steps_of(learners, config, batch, ["1 x 8, packed", "2 x 1, packed", "2 x 2, padded"], policy=policy)
    assert 2.0 < assert_same(steps, batch).sums["loss/router_auxiliary_loss"] < 8.0  # even .. all to the same two
