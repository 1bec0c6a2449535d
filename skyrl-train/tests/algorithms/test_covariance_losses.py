"""Clip-Cov and KL-Cov: which tokens of a mini-batch are treated apart, and what happens to them."""

import math

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry, TokenSelectorRegistry, register_token_selector
from skyrl_train.config import AlgorithmConfig

# Means -3 and 10 over the four tokens of the mask, so the covariances are 2*2, 1*1, 0*0 and -3*-3.
LOG_PROBS = torch.tensor([[-1.0, -2.0, float("nan")], [-3.0, 7.0, -6.0]])
ADVANTAGES = torch.tensor([[12.0, 11.0, float("inf")], [10.0, 100.0, 7.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
NOISE = torch.tensor([[0.7, 0.2, 0.0], [0.5, 0.1, 0.9]])


def select(name: str, log_probs=LOG_PROBS, old=None, advantages=ADVANTAGES, mask=MASK, noise=NOISE, **settings):
    config = AlgorithmConfig.from_dict({name: settings})
    old = log_probs if old is None else old
    return TokenSelectorRegistry.get(name)(log_probs, old, advantages, mask, noise, config)


def tokens(selected: torch.Tensor) -> list[list[int]]:
    return selected.nonzero().tolist()


@pytest.mark.parametrize(
    ("share", "lower", "upper", "expected"),
    [
        (
            0.0002,
            0.5,
            5.0,
            [[0, 1]],
        ),  # covariances 4 and 1 qualify; one token, at least, and the noise draws the second
        (0.5, 0.5, 5.0, [[0, 0], [0, 1]]),  # two of four tokens
        (0.0002, 1.0, 5.0, [[0, 0]]),  # the lower bound is exclusive
        (1.0, 0.5, 4.0, [[0, 1]]),  # the upper bound too
        (1.0, 3.0, 20.0, [[0, 0], [1, 2]]),  # fewer qualify than are asked for
        (1.0, 10.0, 20.0, []),  # none qualifies
    ],
)
def test_clip_cov_samples_high_covariance_tokens(share, lower, upper, expected):
    assert tokens(select("clip_cov", clip_ratio=share, clip_cov_lb=lower, clip_cov_ub=upper)) == expected


def test_clip_cov_excludes_already_clipped_tokens():
    old = LOG_PROBS.clone()
    old[0, 1] -= math.log(2.0)  # ratio 2 and a positive advantage: clipped
    assert tokens(select("clip_cov", old=old, clip_ratio=1.0, clip_cov_lb=0.5, clip_cov_ub=5.0)) == [[0, 0]]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.1, [[1, 2]]), (0.49, [[1, 2]]), (0.5, [[0, 0], [1, 2]]), (1.0, [[0, 0], [0, 1], [1, 0], [1, 2]])],
)
def test_kl_cov_selects_top_covariances(share, expected):
    assert tokens(select("kl_cov", kl_cov_frac=share)) == expected


def test_noise_breaks_covariance_ties():
    """All advantages alike: every covariance is 0, and half of the tokens are drawn."""
    assert tokens(select("kl_cov", advantages=torch.zeros(2, 3), kl_cov_frac=0.5)) == [[0, 1], [1, 0]]


def test_clip_cov_samples_candidates_uniformly():
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.tensor([[-1.0, -1.0, -1.0, -7.0]])
    advantages = torch.tensor([[1.0, 1.0, 1.0, -7.0]])  # covariances 1.5 * 3 three times, 4.5 * 9 once
    mask, counts = torch.ones(1, 4), torch.zeros(1, 4)
    for _ in range(600):
        noise = torch.rand(1, 4, generator=generator)
        counts += select("clip_cov", log_probs, None, advantages, mask, noise, clip_ratio=0.01)
    assert counts[0, 3] == 0 and counts.sum() == 600
    assert (counts[0, :3] - 200).abs().max() < 45  # four standard deviations are 46


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_empty_mini_batch_selects_no_tokens(name):
    assert tokens(select(name, mask=torch.zeros(2, 3))) == []


def test_clip_cov_zeroes_selected_tokens_but_counts_them_in_mean():
    log_probs = torch.zeros(1, 3, requires_grad=True)
    loss, metrics = PolicyLossRegistry.get("clip_cov")(
        log_probs,
        torch.tensor([[0.0, 0.0, -1.0]]),
        torch.ones(1, 3),
        AlgorithmConfig(),
        torch.ones(1, 3),
        selected_tokens=torch.tensor([[True, False, False]]),
    )
    torch.testing.assert_close(loss.detach(), torch.tensor([[0.0, -1.0, -1.2]]))
    loss.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [[0.0, -1.0, 0.0]]
    assert metrics["clip_ratio"].tolist() == [[1.0, 0.0, 1.0]]
    assert metrics["selected_ratio"].tolist() == [[1.0, 0.0, 0.0]]


def test_kl_cov_penalizes_selected_tokens():
    """Ratios 2 and 1/2, advantage 1, penalty 0.5 * ln 2: it pulls back to ratio 1 from either side."""
    log_probs = torch.tensor([[math.log(2.0), math.log(2.0), -math.log(2.0)]], requires_grad=True)
    loss, metrics = PolicyLossRegistry.get("kl_cov")(
        log_probs,
        torch.zeros(1, 3),
        torch.ones(1, 3),
        AlgorithmConfig.from_dict({"kl_cov": {"ppo_kl_coef": 0.5}}),
        torch.ones(1, 3),
        selected_tokens=torch.tensor([[False, True, True]]),
    )
    penalty = 0.5 * math.log(2.0)
    torch.testing.assert_close(loss.detach(), torch.tensor([[-2.0, -2.0 + penalty, -0.5 + penalty]]))
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-2.0, -2.0 + 0.5, -0.5 - 0.5]]))
    assert metrics["selected_ratio"].tolist() == [[0.0, 1.0, 1.0]]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_missing_token_selection_raises(name):
    with pytest.raises(TypeError, match="selected_tokens"):
        PolicyLossRegistry.get(name)(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), AlgorithmConfig())


def test_registered_selector_is_found_by_name():
    @register_token_selector("test_none")
    def none(log_probs, old_log_probs, advantages, loss_mask, noise, config):
        return loss_mask == 2

    try:
        assert TokenSelectorRegistry.get("test_none") is none
        assert "test_none" in TokenSelectorRegistry
        assert "regular" not in TokenSelectorRegistry
    finally:
        TokenSelectorRegistry.unregister("test_none")
