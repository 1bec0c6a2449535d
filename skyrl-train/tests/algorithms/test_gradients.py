"""Every loss against a float64 reference written with plain numbers, and every gradient against that of its formula."""

import math

import pytest
import torch

from skyrl_train.algorithms.kl import compute_approx_kl
from skyrl_train.algorithms.losses import (
    PolicyLossRegistry,
    TokenSelectorRegistry,
    importance_ratio,
)
from skyrl_train.algorithms.reduction import weighted_sum
from skyrl_train.config import AlgorithmConfig

# No setting at its default, and all bounds where some tokens are beyond them.
CONFIG = AlgorithmConfig.from_dict(
    {
        "eps_clip_low": 0.1,
        "eps_clip_high": 0.3,
        "clip_ratio_c": 1.3,
        "value_clip": 0.3,
        "cispo": {"cispo_eps_clip_low": 0.25, "cispo_eps_clip_high": 0.35},
        "sapo": {"tau_pos": 1.3, "tau_neg": 0.7},
        "clip_cov": {"clip_ratio": 0.2, "clip_cov_lb": 0.02, "clip_cov_ub": 1.0},
        "kl_cov": {"kl_cov_frac": 0.3, "ppo_kl_coef": 0.7},
        "dppo": {"delta_low": 0.03, "delta_high": 0.05},
        "decoupled_ppo": {"behavior_weight_cap": 1.2},
        "dpo": {"beta": 0.4},
    }
)
OURS = [
    name
    for name in PolicyLossRegistry.list_available()
    if PolicyLossRegistry.get(name).__module__.startswith("skyrl_train.")
]
EVERY_LOSS = pytest.mark.parametrize("name", OURS)


class Batch:
    """6 ragged rows of 7 tokens; a hole in the mask as an environment's words leave it. The numbers are float32's, so
    that nothing but the loss itself rounds. With this seed every loss that clips has, for each sign of the advantage,
    tokens within its limits and beyond them."""

    def __init__(self, dtype: torch.dtype = torch.float64, seed: int = 24):
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(6, 7, generator=generator)

        old = -0.3 - 2 * torch.rand(6, 7, generator=generator)
        columns = old + normal(0.3), old, old + normal(0.2), normal(1.0)
        self.log_probs, self.old, self.rollout, self.advantages = (column.to(dtype) for column in columns)
        self.log_probs = self.log_probs.clamp(max=-0.01)
        self.mask = (torch.arange(7) < torch.tensor([7, 3, 6, 5, 1, 4]).unsqueeze(1)).float()
        self.mask[0, 2] = 0
        self.noise = torch.rand(6, 7, generator=generator)
        self.selected: dict[str, torch.Tensor] = {}
        for name in ("clip_cov", "kl_cov"):
            inputs = self.log_probs, self.old, self.advantages, self.mask, self.noise, CONFIG
            self.selected[name] = TokenSelectorRegistry.get(name)(*inputs)

    def loss(self, name: str, log_probs: torch.Tensor | None = None) -> torch.Tensor:
        extra = {"selected_tokens": self.selected[name]} if name in self.selected else {}
        log_probs = self.log_probs if log_probs is None else log_probs
        inputs = log_probs, self.old, self.advantages, CONFIG, self.mask, self.rollout
        return PolicyLossRegistry.get(name)(*inputs, **extra)[0]


# ---- the references, one token at a time: `now` is the log-prob that has a gradient, `still` the same one without


def clipped(ratio: float, advantage: float) -> float:
    near = min(max(ratio, 1 - 0.1), 1 + 0.3)
    return -min(ratio * advantage, near * advantage)


def token_loss(name: str, now: float, still: float, old: float, rollout: float, advantage: float, apart: bool) -> float:
    ratio, still_ratio = math.exp(now - old), math.exp(still - old)
    if name == "regular":
        return clipped(ratio, advantage)
    if name == "dual_clip":
        return min(clipped(ratio, advantage), -1.3 * advantage) if advantage < 0 else clipped(ratio, advantage)
    if name == "cispo":
        return -min(max(still_ratio, 0.75), 1.35) * advantage * now
    if name == "sapo":
        tau = 1.3 if advantage > 0 else 0.7
        return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    if name == "importance_sampling":
        return -ratio * advantage
    if name == "clip_cov":
        return 0.0 if apart else clipped(ratio, advantage)
    if name == "kl_cov":
        return -ratio * advantage + (0.7 * abs(now - old) if apart else 0.0)
    if name == "rollout_is":
        weight = math.exp(still - rollout)
        return -weight * advantage * now if 0.9 < weight < 1.3 else 0.0
    if name == "dppo":
        rise = math.exp(still) - math.exp(rollout)
        stopped = rise > 0.05 if advantage > 0 else -rise > 0.03
        return 0.0 if stopped else -math.exp(now - rollout) * advantage
    if name == "decoupled_ppo":
        weight = math.exp(old - rollout)
        return weight * clipped(ratio, advantage) if weight <= 1.2 else 0.0
    assert name == "cross_entropy"
    return -now


def reference(name: str, batch: Batch, now: torch.Tensor) -> torch.Tensor:
    loss = torch.zeros(6, 7, dtype=torch.float64)
    tokens = [(b, t) for b in range(6) for t in range(7) if batch.mask[b, t]]
    columns = batch.log_probs, batch.old, batch.rollout, batch.advantages

    def drift(b: int, log_probs: torch.Tensor) -> list[float]:
        return [(log_probs[b, t] - batch.old[b, t]).item() for c, t in tokens if c == b]

    for b, t in tokens:
        if name == "gspo":
            mean = sum(drift(b, batch.log_probs)) / len(drift(b, batch.log_probs))
            ratio = math.exp(mean + (now[b, t] - batch.log_probs[b, t]).item())
            loss[b, t] = clipped(ratio, batch.advantages[b, t].item())
        elif name == "dpo":
            chosen = b - b % 2
            margin = 0.4 * (sum(drift(chosen, now)) - sum(drift(chosen + 1, now)))
            loss[b, t] = math.log(1 + math.exp(-margin))
        else:
            at_still, at_old, at_rollout, advantage = (column[b, t].item() for column in columns)
            apart = name in batch.selected and bool(batch.selected[name][b, t])
            loss[b, t] = token_loss(name, now[b, t].item(), at_still, at_old, at_rollout, advantage, apart)
    return loss


@EVERY_LOSS
def test_loss_matches_formula(name: str):
    exact = reference(name, Batch(), Batch().log_probs)
    torch.testing.assert_close(Batch().loss(name), exact, rtol=1e-12, atol=1e-12)
    single = Batch(torch.float32).loss(name)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=1e-6, atol=1e-6)


@EVERY_LOSS
def test_gradient_matches_formula_with_stop_gradients(name: str):
    batch, step = Batch(), 1e-6
    log_probs = batch.log_probs.clone().requires_grad_()
    weights = torch.rand(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weighted_sum(batch.loss(name, log_probs), weights * batch.mask).backward()
    slope = torch.zeros(6, 7, dtype=torch.float64)
    for b in range(6):
        for t in range(7):
            bump = torch.zeros(6, 7, dtype=torch.float64)
            bump[b, t] = step
            rise = reference(name, batch, batch.log_probs + bump) - reference(name, batch, batch.log_probs - bump)
            slope[b, t] = (rise * weights).sum() / (2 * step)
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", [name for name in OURS if PolicyLossRegistry.get_requirements(name).advantages])
def test_on_policy_gradient_equals_policy_gradient(name: str):
    """Whatever a loss does away from ratio 1: there, d loss / d log pi = -A of each token; but Clip-Cov takes its
    chosen tokens out even then."""
    batch = Batch()
    batch.log_probs = batch.rollout = batch.old
    log_probs = batch.old.clone().requires_grad_()
    batch.loss(name, log_probs).sum().backward()
    expected = -batch.advantages * batch.mask
    if name == "clip_cov":
        assert batch.selected[name].any()
        expected[batch.selected[name]] = 0.0
    torch.testing.assert_close(log_probs.grad, expected)


# ---- what must have no gradient, and what must have one


@pytest.mark.parametrize(
    ("log_ratio", "ratio", "slope"), [(19.0, 19.0, 19.0), (25.0, 20.0, None), (-25.0, -20.0, None)]
)
def test_ratio_is_clipped_and_constant_beyond_bounds(log_ratio: float, ratio: float, slope: float | None):
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    value = importance_ratio(log_probs, torch.zeros(1, 1))
    torch.testing.assert_close(value.detach(), torch.tensor([[ratio]]).exp())
    value.sum().backward()
    expected = torch.zeros(1, 1) if slope is None else torch.tensor([[slope]]).exp()
    torch.testing.assert_close(log_probs.grad, expected)


@EVERY_LOSS
@pytest.mark.parametrize(
    ("given", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_half_precision_uses_float32_and_float64_is_kept(name: str, given: torch.dtype, computed: torch.dtype):
    batch = Batch(given)
    widened = Batch(given)
    for column in ("log_probs", "old", "rollout", "advantages"):
        setattr(widened, column, getattr(widened, column).to(computed))
    assert batch.loss(name).dtype == computed
    assert torch.equal(batch.loss(name), widened.loss(name))


def test_kl_of_half_precision_is_computed_in_float32():
    kl = compute_approx_kl(torch.tensor([[-1.0]]).bfloat16(), torch.tensor([[-1.0078125]]).bfloat16(), None, "k2")
    torch.testing.assert_close(kl, torch.tensor([[0.0078125**2 / 2]]))


def test_registered_losses_clip_some_tokens_and_train_others():
    """Control: the comparisons above see both sides of every bound."""
    batch = Batch()
    for name in ("regular", "dual_clip", "gspo", "cispo", "rollout_is", "dppo", "decoupled_ppo", "clip_cov"):
        extra = {"selected_tokens": batch.selected[name]} if name in batch.selected else {}
        inputs = batch.log_probs, batch.old, batch.advantages, CONFIG, batch.mask, batch.rollout
        _, metrics = PolicyLossRegistry.get(name)(*inputs, **extra)
        share = (metrics["clip_ratio"] * batch.mask).sum() / batch.mask.sum()
        assert 0 < share < 1, name
        if name == "decoupled_ppo":
            assert 0 < metrics["behavior_capped"].sum() < batch.mask.sum()
    for selected in batch.selected.values():
        assert 0 < selected.sum() < batch.mask.sum()
