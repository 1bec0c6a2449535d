"""Selection of rollouts for training."""

import math

import pytest
import torch

from skyrl_train.algorithms.sampling import (
    compute_overlong_penalty,
    draw_replacements,
    find_informative_groups,
    find_zero_variance_rows,
)

REWARDS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.5]
UIDS = list("aabbcc")
"""Prompts of the samples: a (rewards 1, 0) and c (0, 1/2) are informative, b (1, 1) is not."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_group_is_informative_when_rewards_differ():
    assert find_informative_groups(REWARDS, UIDS) == ["a", "c"]
    assert find_zero_variance_rows(REWARDS, UIDS).tolist() == [False, False, True, True, False, False]


def test_single_sample_group_is_kept():
    assert find_informative_groups([0.0, 1.0, 1.0], ["alone", "b", "b"]) == ["alone"]


def test_tolerance_bounds_difference_of_highest_and_lowest_reward():
    assert find_informative_groups([0.0, 0.5e-6, 1e-6], ["a"] * 3) == []
    assert find_informative_groups([0.0, 0.5e-6, 1.1e-6], ["a"] * 3) == ["a"]
    assert find_informative_groups([0.0, 0.2], ["a", "a"], tolerance=0.2) == []
    assert find_informative_groups([0.0, 1e-9], ["a", "a"], tolerance=0.0) == ["a"]


def test_large_equal_rewards_are_treated_as_equal():
    assert find_informative_groups([1e9 / 3] * 7, ["a"] * 7) == []


@pytest.mark.parametrize("failed", [None, math.nan, math.inf])
def test_failed_rollout_is_ignored(failed):
    # Without the failed one, a is (1, 1), b is (1, 0), and c is nothing at all.
    rewards, uids = [1.0, 1.0, failed, 1.0, 0.0, failed, failed], list("aaabbbc")
    assert find_informative_groups(rewards, uids) == ["b"]
    assert find_zero_variance_rows(rewards, uids).tolist() == [True] * 3 + [False] * 3 + [True]


def test_group_rows_may_be_non_adjacent():
    assert find_informative_groups([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"]) == ["a"]


def test_bad_group_is_replaced_by_copy_of_good_group():
    sources = draw_replacements([True, False, True], 0.3, generator())
    assert sources is not None
    assert (sources[0], sources[2]) == (0, 2)
    assert sources[1] in (0, 2)


def test_replacements_are_seeded_and_cover_all_good_groups():
    drawn = []
    for seed in range(20):
        sources, again = (draw_replacements([True, False, True], 0.3, generator(seed)) for _ in range(2))
        assert sources is not None and sources == again
        drawn.append(sources[1])
    assert set(drawn) == {0, 2}


def test_too_few_good_groups_give_none():
    assert draw_replacements([True, False, True], 2 / 3, generator()) is None  # 2 of 3 is not more than 2/3
    assert draw_replacements([True, False, True], 0.6, generator()) is not None
    assert draw_replacements([False], 0.0, generator()) is None


def test_good_groups_are_unchanged():
    assert draw_replacements([True, True], 0.3, generator()) == [0, 1]


def test_missing_reward_is_rejected():
    with pytest.raises(ValueError, match="2 rewards and 1 uids"):
        find_informative_groups([1.0, 2.0], ["a"])


def test_empty_overlong_buffer_is_rejected():
    with pytest.raises(ValueError, match="buffer_len of at least 1"):
        compute_overlong_penalty(torch.tensor([1]), 10, 0, 1.0)
