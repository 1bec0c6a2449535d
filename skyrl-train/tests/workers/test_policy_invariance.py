"""The loss and the gradient of a mini-batch are its own: no split over ranks or micro-batches changes them."""

from typing import Any

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.training_batch import TrainingInputBatch

pytestmark = pytest.mark.slow

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


def assert_same(steps: dict[str, Any], batch: TrainingInputBatch) -> None:
    """The same to 1e-5, whatever the split."""
    kept = batch.tensor("loss_mask") > 0
    expected = next(iter(steps.values()))
    for split, step in steps.items():
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), split
        torch.testing.assert_close(step.before[kept], expected.before[kept], atol=1e-5, rtol=0, msg=split)
        assert step.sums.keys() == expected.sums.keys(), split
        for name, value in expected.sums.items():
            assert step.sums[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (split, name)
        for name, weight in expected.weights.items():
            # The first Adam step is lr * sign(g) where g is not tiny: compare what is not at that edge.
            assert (step.weights[name] - weight).abs().median() < 1e-5, (split, name)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_no_split_changes_loss_or_gradient(learners, config, ragged_batch, reduction):
    batch = ragged_batch(columns=["shift"])
    batch["shift"] = batch.tensor("shift") / 5
    steps = {}
    for split in SPLITS if reduction == "token_mean" else FEW_SPLITS:
        num_ranks, how = SPLITS[split]
        cfg = config(**how, algorithm=dict(loss_reduction=reduction))
        steps[split] = learners.step("policy", cfg, batch, num_ranks)
    first = steps["1 x 8, packed"]
    assert first.grad_norm > 0.01
    assert first.sums["token/policy_kl"] > 0
    assert first.sums["token/clip_ratio"] > 0
    assert first.sums["max/ratio_deviation"] > 0.1
    assert_same(steps, batch)


@pytest.mark.parametrize("num_rows", [1, 3, 13])
def test_ranks_with_uneven_numbers_of_rows_agree_with_one_process(learners, config, ragged_batch, num_rows):
    batch = ragged_batch(num_rows)
    steps = {split: learners.step("policy", config(**how), batch, num_ranks) for split, (num_ranks, how) in SPLITS.items() if split in {*FEW_SPLITS, "2 x 1, packed", "2 x 1 tokens"}}  # fmt: skip
    assert steps["1 x 8, packed"].sums["num_tokens"] == batch.tensor("loss_mask").sum()
    assert_same(steps, batch)


@pytest.mark.parametrize("split", SPLITS)
def test_the_first_ratio_is_exactly_one(learners, config, ragged_batch, split):
    num_ranks, how = SPLITS[split]
    sums = learners.step("policy", config(**how), ragged_batch(13), num_ranks).sums
    assert sums["max/ratio_deviation"] == 0.0
    assert sums["token/ratio"] == sums["num_tokens"]
    assert sums["token/clip_ratio"] == 0.0


def test_one_update_needs_no_forward_of_its_own_for_the_old_log_probs(learners, config, ragged_batch):
    batch = ragged_batch(13)
    staged = learners.step("policy", config(), batch, 2)
    own = learners.step("policy", config(), batch, 2, stage_old=False)
    kept = batch.tensor("loss_mask") > 0
    assert torch.equal(own.before[kept], staged.before[kept])
    assert own.sums == staged.sums
    assert own.grad_norm == staged.grad_norm
    assert all(torch.equal(own.weights[name], weight) for name, weight in staged.weights.items())


@pytest.mark.parametrize("packing", [True, False])
def test_what_stands_at_padding_changes_nothing(learners, config, ragged_batch, packing):
    columns = ["shift", "rollout_logprobs", "off_policy_weights"]
    batch, polluted = ragged_batch(columns=columns), ragged_batch(columns=columns)
    padding, masked = polluted.tensor("attention_mask") == 0, polluted.tensor("loss_mask") == 0
    polluted["sequences"] = torch.where(padding, 63, polluted.tensor("sequences"))
    for name, garbage in zip(["advantages", *columns], [float("nan"), float("inf"), float("nan"), -float("inf")], strict=True):  # fmt: skip
        polluted[name] = torch.where(masked, garbage, polluted.tensor(name))
    cfg = config(use_sample_packing=packing)
    assert_same(
        {"clean": learners.step("policy", cfg, batch), "polluted": learners.step("policy", cfg, polluted)}, batch
    )


@pytest.mark.parametrize("loss", PolicyLossRegistry.list_available())
def test_every_loss_runs_through_the_worker_and_no_split_changes_it(learners, config, ragged_batch, loss):
    batch = ragged_batch(16, columns=["shift", "rollout_logprobs"])
    batch["shift"] = batch.tensor("shift") / 5
    batch["rollout_logprobs"] = batch.tensor("rollout_logprobs") / 5 - 4
    batch["token_noise"] = torch.rand(16, 7, generator=torch.Generator().manual_seed(0))
    algorithm = dict(policy_loss_type=loss, clip_cov=dict(clip_ratio=0.1, clip_cov_lb=0.1))
    if loss == "dpo":
        algorithm["loss_reduction"] = "sequence_mean"
        batch["loss_mask"] = batch.tensor("loss_mask")
    unit = 2 if loss == "dpo" else 1
    steps = {
        split: learners.step("policy", config(**how, algorithm=algorithm), batch, num_ranks, unit=unit)
        for split, (num_ranks, how) in SPLITS.items()
        if split in FEW_SPLITS
    }
    assert steps[FEW_SPLITS[0]].grad_norm > 0.01
    assert_same(steps, batch)
