"""Learning from given answers (cross-entropy) and from pairs of answers (DPO)."""

import math

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.algorithms.reduction import reduce_loss
from skyrl_train.config import AlgorithmConfig

CONFIG = AlgorithmConfig.from_dict({"dpo": {"beta": 0.5}})
# Two pairs. Sums of log(pi / pi_ref): 2 and -2 (margin 0.5 * 4 = 2), then -1 and 1 (margin -1).
DRIFT = torch.tensor([[1.0, 1.0, 9.0], [-2.0, 9.0, 9.0], [-0.5, -0.25, -0.25], [1.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]])


def dpo(drift: torch.Tensor, mask: torch.Tensor | None = MASK):
    reference = torch.full_like(drift, -3.0)
    return PolicyLossRegistry.get("dpo")(reference + drift, reference, None, CONFIG, mask)


def test_cross_entropy_is_token_negative_log_likelihood():
    log_probs = torch.tensor([[-0.5, -2.0, float("-inf")]], requires_grad=True)
    loss, metrics = PolicyLossRegistry.get("cross_entropy")(
        log_probs, None, None, AlgorithmConfig(), torch.tensor([[1, 1, 0]])
    )
    assert loss.tolist() == [[0.5, 2.0, 0.0]] and metrics == {}
    loss.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [[-1.0, -1.0, 0.0]]


def test_dpo_of_two_pairs_matches_manual_result():
    loss, metrics = dpo(DRIFT)
    first, second = math.log(1 + math.exp(-2.0)), math.log(1 + math.exp(1.0))
    rows = torch.tensor([[first], [first], [second], [second]])
    torch.testing.assert_close(loss, rows * MASK)
    torch.testing.assert_close(metrics["dpo_margin"], torch.tensor([[2.0], [2.0], [-1.0], [-1.0]]) * MASK)
    assert torch.equal(metrics["dpo_accuracy"], torch.tensor([[1.0], [1.0], [0.0], [0.0]]) * MASK)


def test_dpo_sequence_mean_is_mean_over_pairs():
    mean = reduce_loss(dpo(DRIFT)[0], MASK, "sequence_mean")
    assert mean.item() == pytest.approx((math.log(1 + math.exp(-2.0)) + math.log(1 + math.exp(1.0))) / 2, rel=1e-6)


def test_dpo_gradient_is_larger_for_misranked_pairs():
    """d loss / d log pi = -beta * sigmoid(-margin) at every chosen token, the opposite at rejected ones."""
    drift = DRIFT.clone().requires_grad_()
    reduce_loss(dpo(drift)[0], MASK, "sequence_mean").backward()
    won, lost = 0.5 / (1 + math.exp(2.0)) / 2, 0.5 / (1 + math.exp(-1.0)) / 2  # over 2 pairs
    torch.testing.assert_close(drift.grad, torch.tensor([[-won], [won], [-lost], [lost]]) * MASK)


@pytest.mark.parametrize(("margin", "loss"), [(400.0, 0.0), (-400.0, 200.0)])
def test_extreme_margin_gives_finite_loss(margin, loss):
    drift = torch.tensor([[margin / 2], [-margin / 2]], requires_grad=True)
    value, _ = dpo(drift, None)
    value.sum().backward()
    torch.testing.assert_close(value.detach(), torch.full((2, 1), loss))
    assert drift.grad is not None and torch.isfinite(drift.grad).all()


@pytest.mark.parametrize(("margin", "accuracy"), [(0.25, 1.0), (0.0, 0.0), (-0.25, 0.0)])
def test_dpo_accuracy_counts_pairs_with_higher_chosen_reward(margin, accuracy):
    metrics = dpo(torch.tensor([[margin], [-margin]]), None)[1]  # beta 0.5: the margin is half the difference
    assert metrics["dpo_margin"].tolist() == [[margin], [margin]]
    assert metrics["dpo_accuracy"].tolist() == [[accuracy], [accuracy]]


def test_incomplete_pair_is_ignored():
    mask = MASK.clone()
    mask[1] = 0
    drift = DRIFT.clone().requires_grad_()
    loss, _ = dpo(drift, mask)
    loss.sum().backward()
    assert loss[:2].abs().sum() == 0 and (loss[2:] * mask[2:]).sum() > 0
    assert drift.grad is not None and drift.grad[:2].abs().sum() == 0


def test_odd_number_of_rows_is_rejected():
    with pytest.raises(ValueError, match="got 3"):
        dpo(DRIFT[:3], MASK[:3])
