"""A few fixed tokens on which trainer and engine must agree."""

import math

import pytest

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.canary import (
    CANARY_LENGTH,
    CanaryTolerance,
    canary_prompts,
    check_canaries,
    mean_difference,
)


def test_canary_tokens_are_fixed_and_within_vocabulary():
    prompts = canary_prompts(vocab_size=50, max_length=4096)
    assert prompts == canary_prompts(vocab_size=50, max_length=4096)
    assert {len(prompt) for prompt in prompts} == {CANARY_LENGTH}
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize(("max_length", "length"), [(9, 8), (3, 2), (1, 2)])  # two tokens: one that has a log-prob
def test_canaries_fit_short_context_with_space_for_response(max_length: int, length: int):
    assert {len(prompt) for prompt in canary_prompts(vocab_size=50, max_length=max_length)} == {length}


@pytest.mark.parametrize(
    "expected, found, difference",
    [
        ([[-1.0, -2.0]], [[-1.0, -2.0]], 0.0),
        ([[-1.0, -2.0]], [[-1.5, -2.0]], 0.25),
        ([[-1.0], [-3.0]], [[-2.0], [-2.0]], 1.0),  # differences do not cancel
        ([[-1.0, -2.0]], [[-1.0]], math.inf),  # an answer that is too short
        ([[-1.0, -2.0]], [], math.inf),
        ([[-1.0, -2.0]], [[-1.0, math.nan]], math.inf),
        ([[-1.0, -2.0]], [[-1.0, -math.inf]], math.inf),
    ],
)
def test_difference_is_mean_over_tokens(expected, found, difference):
    assert mean_difference(expected, found) == pytest.approx(difference)


def test_differing_engine_is_named():
    good, bad = [[-1.0, -2.0]], [[-1.0, -4.4]]
    assert check_canaries(good, [good, good], tolerance=1e-3, version=7) == 0.0
    with pytest.raises(WeightSyncError, match=r"version 7, engine 1 .* 1\.2 .*0\.001"):
        check_canaries(good, [good, bad], tolerance=1e-3, version=7)


LOG_PROBS = [[-4.0, -2.0], [-1.0, -5.0]]  # of mean size 3


def test_tolerance_is_ten_times_gap_of_first_syncs():
    tolerance = CanaryTolerance(["bfloat16", "float32"])
    assert tolerance.now(LOG_PROBS) == 0.3  # nothing is measured: what bfloat16 explains
    for gap in (0.003, 0.004, 0.0035):
        tolerance.update(gap, LOG_PROBS)
    assert tolerance.now(LOG_PROBS) == pytest.approx(0.035)
    assert tolerance.now([[-8.0, -4.0], [-2.0, -10.0]]) == pytest.approx(0.07)  # rounding grows with the numbers


def test_tolerance_counts_log_probs_near_zero_as_1_nat():
    """A model that is sure of every token: rounding does not shrink with its log-probs."""
    tolerance = CanaryTolerance(["bfloat16"])
    tolerance.update(0.003, [[-0.1, -0.3]])
    assert tolerance.now([[-0.1, -0.3]]) == tolerance.now([[0.0]]) == pytest.approx(0.03)
    assert tolerance.now([[-1.5, -1.5]]) == pytest.approx(0.045)


def test_tolerance_does_not_follow_slowly_growing_gap():
    tolerance = CanaryTolerance(["bfloat16"])
    for sync in range(100):
        tolerance.update(0.003 * 1.05**sync, LOG_PROBS)
    assert tolerance.now(LOG_PROBS) == pytest.approx(10 * 0.003 * 1.05**2)


@pytest.mark.parametrize(
    "formats, gap, expected", [(["float32"], 1e-7, 1e-4), (["float32"], 5e-4, 1e-3), (["float32", "bfloat16"], 0, 0.02)]
)
def test_tolerance_is_bounded_by_number_format(formats, gap, expected):
    tolerance = CanaryTolerance(formats)
    tolerance.update(gap, LOG_PROBS)
    assert tolerance.now(LOG_PROBS) == pytest.approx(expected)


def test_configured_tolerance_applies_from_first_sync():
    tolerance = CanaryTolerance(["bfloat16"], fixed=0.5)
    tolerance.update(0.003, LOG_PROBS)
    assert tolerance.now(LOG_PROBS) == 0.5
