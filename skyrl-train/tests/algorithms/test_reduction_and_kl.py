"""Reductions as weights, and KL estimates, by hand and by invariance."""

import math
from typing import get_args

import pytest
import torch

from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, compute_approx_kl
from skyrl_train.algorithms.reduction import LossReduction, masked_mean, reduce_loss, token_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])
MASK = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", (1 + 2 + 3 + 4) / 4),
        ("sequence_mean", ((1 + 2 + 3) / 3 + 4) / 2),
        ("seq_mean_token_sum_norm", ((1 + 2 + 3) / 10 + 4 / 10) / 2),
        ("prompt_mean", ((1 + 2 + 3) / 3 + 4) / 2),  # two prompts of one answer each
    ],
)
def test_reductions_match_manual_results(reduction, expected):
    loss = reduce_loss(LOSS, MASK, reduction, max_seq_len=10, index=["a", "b"])
    torch.testing.assert_close(loss, torch.tensor(expected))


def test_prompt_mean_weights_prompts_equally():
    """Prompt x: answers of 2 and 1 tokens, token mean (1 + 2 + 6) / 3 = 3; prompt y: one token of 5; z: none at all."""
    loss = torch.tensor([[1.0, 2.0], [5.0, 9.0], [6.0, 9.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]])
    assert reduce_loss(loss, mask, "prompt_mean", index=["x", "y", "x", "z"]).item() == pytest.approx((3 + 5) / 2)
    expected = torch.tensor([[1 / 6, 1 / 6], [1 / 2, 0], [1 / 6, 0], [0, 0]])
    torch.testing.assert_close(token_weights(mask, "prompt_mean", index=[7, ("y",), 7, None]), expected)


EVERY_REDUCTION = pytest.mark.parametrize("reduction", get_args(LossReduction))


@EVERY_REDUCTION
def test_reduction_gradient_equals_weights(reduction):
    loss = torch.where(MASK == 0, float("nan"), LOSS).requires_grad_()
    reduce_loss(loss, MASK, reduction, 10, index=["a", "b"]).backward()
    assert loss.grad is not None
    assert torch.equal(loss.grad, token_weights(MASK, reduction, 10, ["a", "b"]))


@EVERY_REDUCTION
def test_empty_mask_gives_zero(reduction):
    assert reduce_loss(LOSS, torch.zeros_like(MASK), reduction, 10, ["a", "b"]).item() == 0.0
    assert masked_mean(LOSS, torch.zeros_like(MASK)).item() == 0.0


def test_dr_grpo_requires_constant():
    with pytest.raises(ValueError, match="max_seq_len"):
        token_weights(MASK, "seq_mean_token_sum_norm")


@pytest.mark.parametrize("index", [None, ["a"]])
def test_prompt_mean_requires_prompt_ids(index):
    with pytest.raises(ValueError, match="prompt_mean"):
        token_weights(MASK, "prompt_mean", index=index)


def test_unknown_reduction_error_lists_known_names():
    with pytest.raises(ValueError, match="token_mean"):
        token_weights(MASK, "mean")  # type: ignore[arg-type]


def test_float64_mask_gives_float64_weights():
    assert token_weights(torch.ones(1, 3).double(), "token_mean")[0, 0].item() == 1 / 3


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", 0.5),
        ("abs", 0.5),
        ("k2", 0.125),
        ("k3", math.exp(-0.5) - 1 + 0.5),
        ("k3+", math.exp(-0.5) - 1 + 0.5),
    ],
)
def test_kl_estimates_match_manual_results(estimator, expected):
    kl = compute_approx_kl(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), None, estimator)
    torch.testing.assert_close(kl, torch.tensor([[expected]]))


@pytest.mark.parametrize("drift", [0.5, -0.5, 3.0, -1.5])
@pytest.mark.parametrize(
    ("estimator", "slope"),
    [
        ("k1", lambda d: 1.0),
        ("abs", lambda d: math.copysign(1.0, d)),
        ("k2", lambda d: d),
        ("k3", lambda d: 1 - math.exp(-d)),
        ("k3+", lambda d: d),
    ],
)
def test_kl_matches_analytic_gradient(estimator, slope, drift):
    log_probs = torch.tensor([[-4.0]], requires_grad=True)
    compute_approx_kl(log_probs, torch.tensor([[-4.0 - drift]]), None, estimator).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[slope(drift)]]))


@pytest.mark.parametrize(
    ("estimator", "drift", "value", "slope"),
    [
        ("k3", -3.0, 10.0, 0.0),
        ("k3", -30.0, 10.0, 0.0),
        ("k3", 30.0, 10.0, 0.0),
        ("k3+", -3.0, 10.0, -3.0),  # a token that the policy has lost is still pulled back
        ("k3+", -30.0, 10.0, 0.0),
        ("k3+", 30.0, 10.0, 0.0),
    ],
)
def test_single_outlier_token_is_bounded(estimator, drift, value, slope):
    log_probs = torch.tensor([[drift]], requires_grad=True)
    kl = compute_approx_kl(log_probs, torch.zeros(1, 1), None, estimator)
    kl.sum().backward()
    assert kl.item() == value
    assert log_probs.grad is not None and log_probs.grad.item() == slope


def two_policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [1, V] of a policy and its reference over five tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.4 * torch.randn(2, 1, 5, generator=generator, dtype=torch.float64)  # no k3 at its bound
    return logits[0], logits[1].log_softmax(-1)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3+"])
def test_expected_estimate_equals_kl(estimator):
    logits, reference = two_policies()
    log_probs = logits.log_softmax(-1)
    exact = (log_probs.exp() * (log_probs - reference)).sum()
    estimate = (log_probs.exp() * compute_approx_kl(log_probs, reference, None, estimator)).sum()
    torch.testing.assert_close(estimate, exact)


def test_expected_gradient_of_k2_and_k3_plus_is_kl_gradient_and_k1_is_zero():
    logits, reference = two_policies()

    def gradient(of_logits) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        of_logits(leaf.log_softmax(-1)).backward()
        assert leaf.grad is not None
        return leaf.grad

    exact = gradient(lambda log_probs: (log_probs.exp() * (log_probs - reference)).sum())

    def sampled(estimator):
        return gradient(lambda now: (now.exp().detach() * compute_approx_kl(now, reference, None, estimator)).sum())

    torch.testing.assert_close(sampled("k2"), exact)
    torch.testing.assert_close(sampled("k3+"), exact)
    assert (sampled("k3") - exact).abs().max() > 0.001
    torch.testing.assert_close(sampled("k1"), torch.zeros_like(exact))
    assert exact.abs().max() > 0.001


def test_unknown_estimator_error_lists_known_names():
    with pytest.raises(ValueError, match="'k4'"):
        compute_approx_kl(torch.zeros(1, 1), torch.zeros(1, 1), None, "k4")  # type: ignore[arg-type]


def test_adaptive_controller_reaches_target():
    controller = AdaptiveKLController(0.1, target=1.0, horizon=100)
    controller.update(current=3.0, n_steps=50)  # twice over the target: the error is clipped to 0.2
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 50 / 100))
    controller.update(current=0.9, n_steps=100)
    assert controller.value == pytest.approx(0.11 * 0.9)
    controller.update(current=0.1, n_steps=100)  # far below the target: the error is clipped to -0.2
    assert controller.value == pytest.approx(0.11 * 0.9 * 0.8)
    fixed = FixedKLController(0.1)
    fixed.update(5.0, 10)
    assert fixed.value == 0.1


@pytest.mark.parametrize("horizon", [0, -1])
def test_adaptive_controller_rejects_horizon_below_one(horizon: int):
    with pytest.raises(ValueError, match=f"must be positive; got {horizon}"):
        AdaptiveKLController(0.1, target=1.0, horizon=horizon)
