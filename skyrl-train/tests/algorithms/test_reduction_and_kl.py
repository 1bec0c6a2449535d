"""Reductions as weights, and KL estimates, by hand and by invariance."""

import math

import pytest
import torch

from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, compute_approx_kl
from skyrl_train.algorithms.reduction import masked_mean, reduce_loss, token_weights, weighted_sum

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4) / 4),
        ("sequence_mean", ((1 + 2 + 3) / 3 + 4) / 2),
        ("seq_mean_token_sum_norm", ((1 + 2 + 3) / 10 + 4 / 10) / 2),
    ],
)
def test_reductions_by_hand(reduction, expected):
    torch.testing.assert_close(reduce_loss(LOSS, MASK, reduction, max_seq_len=10), torch.tensor(expected))


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_parts_of_a_batch_add_up_and_masked_garbage_changes_nothing(reduction):
    weights = token_weights(MASK, reduction, 10)
    whole = weighted_sum(LOSS, weights)
    parts = weighted_sum(LOSS[:1], weights[:1]) + weighted_sum(LOSS[1:], weights[1:])
    torch.testing.assert_close(parts, whole)
    garbage = torch.where(MASK == 0, float("nan"), LOSS)
    assert torch.equal(weighted_sum(garbage, weights), whole)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_a_row_without_tokens_is_as_if_it_were_not_there(reduction):
    with_failed = torch.cat([MASK, torch.zeros(1, 3)])
    torch.testing.assert_close(token_weights(with_failed, reduction, 10)[:2], token_weights(MASK, reduction, 10))


def test_an_empty_mask_gives_zero_not_nan():
    assert reduce_loss(LOSS, torch.zeros_like(MASK), "token_mean").item() == 0.0
    assert masked_mean(LOSS, torch.zeros_like(MASK)).item() == 0.0


def test_the_constant_of_dr_grpo_must_be_given():
    with pytest.raises(ValueError, match="max_seq_len"):
        token_weights(MASK, "seq_mean_token_sum_norm")


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)],
)
def test_kl_estimates_by_hand(estimator, expected):
    kl = compute_approx_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), None, estimator)
    torch.testing.assert_close(kl, torch.tensor([[expected]]))


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))])
def test_kl_has_the_analytic_gradient(estimator, slope):
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    compute_approx_kl(log_probs, torch.tensor([[-1.5]]), None, estimator).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[slope]]))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_garbage_behind_the_mask_reaches_neither_kl_nor_gradient(estimator):
    log_probs = torch.tensor([[-1.0, float("-inf")]], requires_grad=True)
    kl = compute_approx_kl(log_probs, torch.tensor([[-1.5, float("-inf")]]), torch.tensor([[1.0, 0.0]]), estimator)
    kl.sum().backward()
    assert kl[0, 1].item() == 0.0
    assert log_probs.grad is not None
    assert log_probs.grad[0, 1].item() == 0.0
    assert torch.isfinite(log_probs.grad).all()


def test_the_adaptive_controller_steers_to_its_target():
    controller = AdaptiveKLController(0.1, target=1.0, horizon=100)
    controller.update(current=3.0, n_steps=50)  # twice over the target: the error is clipped to 0.2
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 50 / 100))
    controller.update(current=0.9, n_steps=100)
    assert controller.value == pytest.approx(0.11 * 0.9)
    fixed = FixedKLController(0.1)
    fixed.update(5.0, 10)
    assert fixed.value == 0.1
