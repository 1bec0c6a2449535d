"""The critic's loss, gradient and values do not depend on how the work is divided."""

import pytest
import torch

SPLITS = (
    (1, dict(micro_size=8)),
    (1, dict(micro_size=2, use_sample_packing=False)),
    (2, dict(micro_size=1)),
    (2, dict(max_tokens_per_microbatch=30)),
)


@pytest.mark.first_case
@pytest.mark.parametrize("num_rows", [16, 3])
def test_loss_gradient_and_values_are_independent_of_split(learners, config, ragged_batch, num_rows):
    batch = ragged_batch(num_rows)
    kept = batch.tensor("loss_mask") > 0
    expected, *others = (learners.step("critic", config(**how), batch, num_ranks) for num_ranks, how in SPLITS)
    assert expected.grad_norm > 0.01
    assert expected.sums["token/values_clipfrac"] >= 1
    assert expected.sums["token/values"] == pytest.approx(float(expected.before[kept].sum()), rel=1e-5)
    for step in others:
        assert step.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        torch.testing.assert_close(step.before[kept], expected.before[kept], atol=1e-5, rtol=0)
        assert step.sums == {name: pytest.approx(value, rel=1e-5, abs=1e-5) for name, value in expected.sums.items()}
        for name, weight in expected.weights.items():
            assert (step.weights[name] - weight).abs().median() < 1e-5, name


def test_loss_is_half_squared_error_to_return(learners, config, ragged_batch):
    batch = ragged_batch()
    cfg = config(algorithm=dict(value_clip=1e9))
    step = learners.step("critic", cfg, batch)
    kept = batch.tensor("loss_mask") > 0
    error = (step.before - batch.tensor("advantages"))[kept]  # the fixture's returns
    assert step.sums["loss/critic_loss"] == pytest.approx(float(error.square().mean() / 2), rel=1e-5)


def test_values_at_padding_are_ignored(learners, config, ragged_batch):
    batch, polluted = ragged_batch(), ragged_batch()
    masked = polluted.tensor("loss_mask") == 0
    polluted["sequences"] = torch.where(polluted.tensor("attention_mask") == 0, 63, polluted.tensor("sequences"))
    polluted["advantages"] = torch.where(masked, float("nan"), polluted.tensor("advantages"))
    expected, actual = (learners.step("critic", config(), which, 2) for which in (batch, polluted))
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert actual.sums == pytest.approx(expected.sums)
