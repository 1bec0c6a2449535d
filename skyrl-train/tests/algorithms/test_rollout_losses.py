"""Losses against the policy that wrote the tokens, one token at a time."""

import math

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.config import AlgorithmConfig
from skyrl_train_testing.loss_checks import check_policy_loss


def one_token(name: str, now: float, old: float, written: float, advantage: float, **settings):
    """The loss, its gradient in log pi, and the metrics of a token by its probabilities."""
    log_probs = torch.tensor([[math.log(now)]], requires_grad=True)
    loss, metrics = PolicyLossRegistry.get(name)(
        log_probs,
        torch.tensor([[math.log(old)]]),
        torch.tensor([[advantage]]),
        AlgorithmConfig.from_dict(settings),
        torch.ones(1, 1),
        torch.tensor([[math.log(written)]]),
    )
    loss.sum().backward()
    assert log_probs.grad is not None
    return loss.item(), log_probs.grad.item(), {key: value.item() for key, value in metrics.items()}


@pytest.mark.parametrize(
    ("now", "written", "advantage", "weight"),
    [
        (0.5, 0.5, 1.0, 1.0),
        (0.55, 0.5, 1.0, 1.1),
        (0.45, 0.5, -2.0, 0.9),
        (0.6001, 0.5, 1.0, 0.0),  # beyond 1.2
        (0.6001, 0.5, -1.0, 0.0),  # whatever the advantage says
        (0.3999, 0.5, 1.0, 0.0),
    ],
)
def test_rollout_is_weights_tokens_within_bounds_and_drops_others(now, written, advantage, weight):
    loss, slope, metrics = one_token("rollout_is", now, 0.01, written, advantage)
    assert loss == pytest.approx(-weight * advantage * math.log(now), rel=1e-5)
    assert slope == pytest.approx(-weight * advantage, rel=1e-5)
    assert metrics == {"clip_ratio": float(weight == 0.0), "ratio": pytest.approx(now / written, rel=1e-5)}


@pytest.mark.parametrize(
    ("divergence", "now", "written", "advantage", "stopped"),
    [
        ("binary_tv", 0.8, 0.5, 1.0, True),  # risen by 0.3
        ("binary_tv", 0.8, 0.5, -1.0, False),  # a bad token that rose may come down
        ("binary_tv", 0.69, 0.5, 1.0, False),  # risen by 0.19
        ("binary_tv", 0.2, 0.5, -1.0, True),
        ("binary_tv", 0.2, 0.5, 1.0, False),
        ("binary_tv", 0.05, 0.01, 1.0, False),  # five times as likely, but rare: PPO would have clipped it
        # KL from 0.5 to p: -ln(4 p (1 - p)) / 2, which is 0.2231 for 0.8, 0.1438 for 0.75.
        ("binary_kl", 0.8, 0.5, 1.0, True),
        ("binary_kl", 0.75, 0.5, 1.0, False),
        ("binary_kl", 0.2, 0.5, -1.0, True),
        ("binary_kl", 0.2, 0.5, 1.0, False),
        ("binary_kl", 0.8, 0.5, -1.0, False),
        # From 0.9 to 0.999: 0.9 ln(0.9 / 0.999) + 0.1 ln(0.1 / 0.001) = 0.3666, where total variation is only 0.099.
        ("binary_kl", 0.999, 0.9, 1.0, True),
        ("binary_tv", 0.999, 0.9, 1.0, False),
    ],
)
def test_dppo_masks_tokens_beyond_bound_in_advantage_direction(divergence, now, written, advantage, stopped):
    loss, slope, metrics = one_token("dppo", now, 0.5, written, advantage, dppo={"divergence": divergence})
    expected = 0.0 if stopped else -now / written * advantage
    assert loss == pytest.approx(expected, rel=1e-5)
    assert slope == pytest.approx(expected, rel=1e-5)
    assert metrics == {"clip_ratio": float(stopped), "ratio": pytest.approx(now / written, rel=1e-5)}


@pytest.mark.parametrize(
    ("now", "advantage", "one_sided", "two_sided"),
    [
        # Written with probability 0.5; the region ends 0.2 below it and 0.1 above it.
        (0.65, 1.0, True, True),  # a good token that has risen too far
        (0.65, -1.0, False, True),  # a bad one that has: going back is refused by the two-sided mask alone
        (0.55, -1.0, False, False),
        (0.35, -1.0, False, False),  # within the lower bound, which is wider
        (0.25, -1.0, True, True),
        (0.25, 1.0, False, True),
        (0.65, 0.0, False, True),  # no advantage: 0 either way, counted as stopped by the two-sided mask
    ],
)
def test_two_sided_dppo_mask_ignores_advantage_sign(now, advantage, one_sided, two_sided):
    for mask, stopped in (("one_sided", one_sided), ("two_sided", two_sided)):
        settings = {"mask": mask, "delta_low": 0.2, "delta_high": 0.1}
        loss, slope, metrics = one_token("dppo", now, 0.5, 0.5, advantage, dppo=settings)
        expected = 0.0 if stopped else -now / 0.5 * advantage
        assert (loss, slope) == (pytest.approx(expected, rel=1e-5), pytest.approx(expected, rel=1e-5))
        assert metrics["clip_ratio"] == float(stopped)


@pytest.mark.parametrize(
    ("now", "old", "written", "weight"),
    [
        (0.4, 0.1, 0.4, 1.0),  # the policy at the start of the step does not matter
        (0.6, 0.6, 0.4, 1.5),
        (0.9, 0.9, 0.1, 3.0),  # 9, clipped at 1 + 2
        (0.1, 0.4, 0.8, 0.5),  # 1/8, clipped at 1 - 0.5
    ],
)
def test_rollout_anchored_cispo_uses_behaviour_policy(now, old, written, weight):
    bounds = {"cispo_anchor": "rollout", "cispo_eps_clip_low": 0.5, "cispo_eps_clip_high": 2.0}
    loss, slope, metrics = one_token("cispo", now, old, written, -2.0, cispo=bounds)
    assert loss == pytest.approx(weight * 2.0 * math.log(now), rel=1e-5)
    assert slope == pytest.approx(weight * 2.0, rel=1e-5)
    clipped = float(weight in (3.0, 0.5))
    assert metrics == {"clip_ratio": clipped, "ratio": pytest.approx(now / written, rel=1e-5)}


def test_rollout_anchored_cispo_requires_engine_log_probs():
    config = AlgorithmConfig.from_dict({"cispo": {"cispo_anchor": "rollout"}})
    with pytest.raises(ValueError, match="cispo_anchor=rollout"):
        PolicyLossRegistry.get("cispo")(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("cispo", {"cispo_anchor": "rollout"}), ("dppo", {"mask": "two_sided", "divergence": "binary_kl"})],
)
def test_loss_options_preserve_invariances(name, settings):
    check_policy_loss(PolicyLossRegistry.get(name), AlgorithmConfig.from_dict({name: settings}), name=name)


@pytest.mark.parametrize("divergence", ["binary_tv", "binary_kl"])
@pytest.mark.parametrize(
    ("now", "written", "stopped"), [(0.0, 0.0, 0), (-1e-8, 0.0, 0), (0.0, -1e-8, 0), (1e-7, -1.0, 1)]
)
def test_dppo_is_finite_for_deterministic_tokens(divergence, now, written, stopped):
    """Log-probs of 0, and above it by rounding. A probability of exactly 1 is infinitely far (KL) from any other, but
    one rounding step is no trust region's business in total variation."""
    log_probs = torch.tensor([[now]], requires_grad=True)
    config = AlgorithmConfig.from_dict({"dppo": {"divergence": divergence}})
    loss, metrics = PolicyLossRegistry.get("dppo")(
        log_probs, log_probs.detach(), torch.ones(1, 1), config, torch.ones(1, 1), torch.tensor([[written]])
    )
    loss.sum().backward()
    assert torch.isfinite(loss).all() and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
    if divergence == "binary_tv" or written == -1.0:
        assert metrics["clip_ratio"].item() == stopped


@pytest.mark.parametrize(
    ("now", "old", "written", "advantage", "expected", "slope"),
    [
        (0.4, 0.4, 0.4, 1.0, -1.0, -1.0),  # on policy in every sense
        (0.4, 0.4, 0.2, 1.0, -2.0, -2.0),  # the step began at twice the rollout's probability: weight 2
        (0.8, 0.4, 0.2, 1.0, -2.4, 0.0),  # clipped around the start of the step: 2 * 1.2
        (0.2, 0.4, 0.8, -1.0, 0.4, 0.0),  # 1/2 * 0.8
        (0.44, 0.4, 0.1, 1.0, 0.0, 0.0),  # weight 4, above the cap of 3: does not train
    ],
)
def test_decoupled_ppo_clips_around_proximal_policy(now, old, written, advantage, expected, slope):
    settings = {"decoupled_ppo": {"behavior_weight_cap": 3.0}}
    loss, gradient, metrics = one_token("decoupled_ppo", now, old, written, advantage, **settings)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert gradient == pytest.approx(slope, rel=1e-5)
    assert metrics["behavior_weight"] == pytest.approx(old / written, rel=1e-5)
    assert metrics["behavior_capped"] == float(old / written > 3.0)
    assert metrics["ratio"] == pytest.approx(now / old, rel=1e-5)


def test_all_tokens_train_without_cap():
    loss, _, metrics = one_token("decoupled_ppo", 0.5, 0.5, 0.005, 1.0)
    assert loss == pytest.approx(-100.0, rel=1e-5)
    assert metrics["behavior_capped"] == 0.0


@pytest.mark.parametrize("name", ["decoupled_ppo", "dppo", "rollout_is"])
def test_missing_rollout_log_probs_are_rejected_by_name(name):
    with pytest.raises(ValueError, match=f"'{name}' needs log-probs of the rollout engine"):
        PolicyLossRegistry.get(name)(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), AlgorithmConfig())
