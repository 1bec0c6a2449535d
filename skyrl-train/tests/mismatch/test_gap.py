"""The distance of two log-probs, by hand."""

import math

import pytest
import torch

from skyrl_inspect.mismatch.gap import compute_gap, compute_quantile


def test_gap_of_four_tokens():
    """Ratios train / rollout: 1, 1, 2, 1/2."""
    rollout = torch.tensor([-1.0, -2.0, -3.0, -1.0])
    train = rollout + torch.tensor([1.0, 1.0, 2.0, 0.5]).log()
    gap = compute_gap(train, rollout, 0.2, 0.2)
    assert gap.num_tokens == 4
    assert gap.mean == pytest.approx(math.log(2) / 2)
    assert gap.p99 == pytest.approx(math.log(2))
    assert gap.max == pytest.approx(math.log(2))
    # rho - 1 - log rho: 0, 0, 1 - ln 2, -1/2 + ln 2
    assert gap.kl == pytest.approx(0.5 / 4)
    assert gap.outside_clip == 0.5
    assert gap.ess == pytest.approx(4.5**2 / (4 * 6.25))


def test_clip_range_bounds_are_respected():
    """A ratio of 1.25 is outside [0.8, 1.2], inside [0.8, 1.28]."""
    rollout = torch.zeros(2) - 1
    train = rollout + torch.tensor([1.0, 1.25]).log()
    assert compute_gap(train, rollout, 0.2, 0.2).outside_clip == 0.5
    assert compute_gap(train, rollout, 0.2, 0.28).outside_clip == 0.0


@pytest.mark.parametrize(("count", "expected"), [(100, 99.0), (200, 198.0), (50, 50.0), (1, 1.0)])
def test_99th_percentile_is_smallest_value_covering_99_percent(count: int, expected: float):
    assert compute_quantile(torch.arange(1.0, count + 1).flip(0), 0.99) == expected
