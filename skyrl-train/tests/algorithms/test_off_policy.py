"""Off-policy correction and the metrics of the mismatch, with ratios that one can multiply in one's head."""

import math
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.off_policy import Correction, correct_off_policy, mismatch_metrics
from skyrl_train.config import OffPolicyCorrectionConfig

NAN = float("nan")
# Token ratios of three sequences; NAN and 1e9 stand where the mask is 0. Products 2, 1/4 and 1; the last has no token.
RATIOS = [[4.0, 0.5, 1e9], [0.5, NAN, 0.5], [1.0, 1.0, 1.0], [NAN, NAN, NAN]]
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])


def correct(ratios=RATIOS, mask=MASK, **settings: Any) -> Correction:
    rollout = torch.full((len(ratios), len(ratios[0])), -2.0)
    return correct_off_policy(
        rollout + torch.tensor(ratios).log(), rollout, mask, OffPolicyCorrectionConfig(**settings)
    )


def test_disabled_corrections_change_nothing():
    correction = correct()
    assert correction.weights is None
    assert correction.loss_mask is MASK
    assert correction.metrics == {}


@pytest.mark.parametrize(
    ("kind", "low", "weights", "under", "over"),
    [
        # Ratios 4, 1/2 | 1/2, 1/2 | 1, 1, 1, capped at 2: the smallest weight is 3/4.
        ("token", 0.75, [[2.0, 0.75, 1.0], [0.75, 1.0, 0.75], [1.0] * 3, [1.0] * 3], 3 / 7, 1 / 7),
        ("token", 0.0, [[2.0, 0.5, 1.0], [0.5, 1.0, 0.5], [1.0] * 3, [1.0] * 3], None, 1 / 7),
        # Products 2, 1/4, 1, capped at 3/2.
        ("sequence", 0.75, [[1.5, 1.5, 1.0], [0.75, 1.0, 0.75], [1.0] * 3, [1.0] * 3], 1 / 3, 1 / 3),
        ("sequence", 0.0, [[1.5, 1.5, 1.0], [0.25, 1.0, 0.25], [1.0] * 3, [1.0] * 3], None, 1 / 3),
    ],
)
def test_tis_weights_are_ratios_of_tokens_or_sequences_within_bounds(kind, low, weights, under, over):
    cap = {"token": 2.0, "sequence": 1.5}[kind]
    bounds = {f"{kind}_tis_ratio_clip_low": low, f"{kind}_tis_ratio_clip_high": cap}
    correction = correct(tis_ratio_type=kind, **bounds)
    torch.testing.assert_close(correction.weights, torch.tensor(weights))
    assert torch.equal(correction.loss_mask, MASK)
    name = f"policy/loss_metrics/tis_{'token' if kind == 'token' else 'seq'}_clip"
    assert correction.metrics.get(f"{name}_low_ratio") == (None if under is None else pytest.approx(under))
    assert correction.metrics[f"{name}_high_ratio"] == pytest.approx(over)


def test_ratio_metrics_use_masked_tokens_only():
    metrics = correct(tis_ratio_type="token").metrics
    ratios = [4.0, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
    mean = sum(ratios) / 7
    assert metrics["policy/loss_metrics/is_ratio_mean"] == pytest.approx(mean)
    assert metrics["policy/loss_metrics/is_ratio_min"] == pytest.approx(0.5)  # not the 0 of a masked position
    assert metrics["policy/loss_metrics/is_ratio_max"] == pytest.approx(4.0)
    std = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / 7)
    assert metrics["policy/loss_metrics/is_ratio_std"] == pytest.approx(std, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "kept_rows", "name", "under", "over"),
    [
        # Products 2, 1/4, 1.
        (dict(sequence_mask_metric="product", product_mask_low=0.3, product_mask_high=3), [0, 2], "product", 1, 0),
        (dict(sequence_mask_metric="product", product_mask_low=0.1, product_mask_high=1.5), [1, 2], "product", 0, 1),
        # Geometric means sqrt(2), 1/2, 1.
        (dict(sequence_mask_metric="geometric", geo_mask_low=0.49, geo_mask_high=1.4), [1, 2], "geo", 0, 1),
        (dict(sequence_mask_metric="geometric", geo_mask_low=0.51, geo_mask_high=1.5), [0, 2], "geo", 1, 0),
        (dict(sequence_mask_metric="geometric"), [2], "geo", 1, 1),  # the defaults: 1% to either side
    ],
)
def test_out_of_range_sequences_are_masked(settings, kept_rows, name, under, over):
    correction = correct(**settings)
    expected = torch.zeros_like(MASK)
    expected[kept_rows] = MASK[kept_rows]
    assert torch.equal(correction.loss_mask, expected)
    assert correction.weights is None
    metrics = {key.rpartition("_mask_")[2]: value for key, value in correction.metrics.items() if f"/{name}_" in key}
    shares = {"masked_ratio": under + over, "under_low_ratio": under, "over_high_ratio": over}
    assert metrics == {key: pytest.approx(value / 3) for key, value in shares.items()}  # of sequences that have tokens


@pytest.mark.parametrize(
    ("low", "high", "kept_rows"),
    [(None, 3.0, [1, 2]), (0.6, None, [2]), (0.6, 3.0, [2]), (0.4, 5.0, [0, 1, 2])],
)
def test_single_outlier_masks_whole_sequence(low, high, kept_rows):
    correction = correct(outlier_token_is_threshold_low=low, outlier_token_is_threshold_high=high)
    expected = torch.zeros_like(MASK)
    expected[kept_rows] = MASK[kept_rows]
    assert torch.equal(correction.loss_mask, expected)
    masked = correction.metrics["policy/loss_metrics/outlier_seq_masked_ratio"]
    assert masked == pytest.approx(1 - len(kept_rows) / 3)


@pytest.mark.parametrize(
    ("low", "high", "kept_tokens", "under", "over"),
    [
        (None, 3.0, [[0, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0]], 0, 1),
        (0.6, None, [[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]], 3, 0),
        (0.6, 3.0, [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]], 3, 1),
    ],
)
def test_token_mask_keeps_rest_of_sequence(low, high, kept_tokens, under, over):
    correction = correct(token_mask_is_threshold_low=low, token_mask_is_threshold_high=high)
    assert correction.loss_mask.tolist() == kept_tokens
    metrics = correction.metrics
    assert metrics["policy/loss_metrics/token_mask_masked_ratio"] == pytest.approx((under + over) / 7)
    assert metrics["policy/loss_metrics/token_mask_under_low_ratio"] == pytest.approx(under / 7)
    assert metrics["policy/loss_metrics/token_mask_over_high_ratio"] == pytest.approx(over / 7)


def test_rules_combine_independently():
    """The token of ratio 4 leaves by the token mask; the product of its sequence is 2 all the same, and capped."""
    correction = correct(
        tis_ratio_type="sequence",
        sequence_tis_ratio_clip_high=1.5,
        token_mask_is_threshold_high=3.0,
        sequence_mask_metric="product",
        product_mask_low=0.3,
        product_mask_high=3.0,
    )
    assert correction.loss_mask.tolist() == [[0, 1, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert correction.weights is not None
    assert correction.weights[0, 1].item() == pytest.approx(1.5)


EVERYTHING: dict[str, Any] = dict(
    tis_ratio_type="token",
    sequence_mask_metric="geometric",
    token_mask_is_threshold_low=0.1,
    outlier_token_is_threshold_high=100.0,
)


def test_empty_batch_gives_no_metrics_and_no_nan():
    correction = correct(mask=torch.zeros_like(MASK), **EVERYTHING)
    assert correction.metrics == {}
    assert correction.weights is not None and torch.equal(correction.weights, torch.ones_like(MASK))
    assert correction.loss_mask.sum() == 0
    assert mismatch_metrics(torch.zeros(2, 2), torch.full((2, 2), NAN), torch.zeros(2, 2)) == {}


def test_equal_log_probs_need_no_correction():
    correction = correct([[1.0] * 3] * 4, **EVERYTHING)
    assert correction.weights is not None and torch.equal(correction.weights, torch.ones_like(MASK))
    assert torch.equal(correction.loss_mask, MASK)


def test_sequences_are_evaluated_independently():
    by_sequence: dict[str, Any] = dict(tis_ratio_type="sequence", sequence_mask_metric="product")
    for settings in (EVERYTHING, by_sequence):
        whole = correct(**settings)
        alone = [correct([ratios], MASK[row : row + 1], **settings) for row, ratios in enumerate(RATIOS)]
        assert torch.equal(torch.cat([each.loss_mask for each in alone]), whole.loss_mask)
        assert whole.weights is not None
        assert torch.equal(torch.cat([each.weights for each in alone if each.weights is not None]), whole.weights)


def test_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    settings = OffPolicyCorrectionConfig(tis_ratio_type="sequence")
    weights = correct_off_policy(old, torch.full((1, 2), -0.1), torch.ones(1, 2), settings).weights
    assert weights is not None and not weights.requires_grad


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_very_low_log_prob_keeps_values_finite(kind):
    old, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-500.0, float("-inf")]])
    settings = OffPolicyCorrectionConfig(tis_ratio_type=kind, sequence_mask_metric="product")
    correction = correct_off_policy(old, rollout, torch.ones(1, 2), settings)
    assert correction.weights is not None and torch.isfinite(correction.weights).all()
    assert correction.loss_mask.sum() == 0
    assert all(math.isfinite(value) for value in correction.metrics.values())


def test_mismatch_matches_manual_result():
    """Two tokens of ratio 4 and 1/2 (a third is masked): log-ratios 2 ln 2 and -ln 2."""
    rollout = torch.tensor([[-3.0, -5.0, 5.0]])
    old = rollout + torch.tensor([[math.log(4.0), -math.log(2.0), NAN]])
    metrics = mismatch_metrics(old, rollout, torch.tensor([[1, 1, 0]]))
    expected = {
        "logprobs_abs_diff_mean": 1.5 * math.log(2),
        "logprobs_abs_diff_max": 2 * math.log(2),
        "logprobs_abs_diff_std": 0.5 * math.log(2),
        "kl_k3": ((4 - 1 - math.log(4)) + (0.5 - 1 + math.log(2))) / 2,
        "ratio_mean": 2.25,
        "ratio_max": 4.0,
        "ratio_min": 0.5,
        "ess": 4.5**2 / (2 * 16.25),
    }
    assert metrics == {f"policy/rollout_train_{name}": pytest.approx(value) for name, value in expected.items()}


@pytest.mark.parametrize(("ratios", "ess"), [([3.0] * 4, 1.0), ([1e6, 1e-6, 1e-6, 1e-6], 0.25)])
def test_effective_sample_size_is_fraction_of_effective_tokens(ratios, ess):
    metrics = mismatch_metrics(torch.tensor([ratios]).log(), torch.zeros(1, 4), torch.ones(1, 4))
    assert metrics["policy/rollout_train_ess"] == pytest.approx(ess, rel=1e-5)
