"""Selection of rollouts for training."""

import math

import pytest
import torch

from skyrl_train.algorithms.sampling import (
    draw_replacements,
    informative_groups,
    overlong_penalty,
    zero_variance_rows,
)

REWARDS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.5]
UIDS = list("aabbcc")
"""Prompts of the samples: a (rewards 1, 0) and c (0, 1/2) are informative, b (1, 1) is not."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_group_is_informative_if_its_rewards_differ():
    assert informative_groups(REWARDS, UIDS) == ["a", "c"]
    assert zero_variance_rows(REWARDS, UIDS).tolist() == [False, False, True, True, False, False]


def test_a_group_of_one_is_kept():
    assert informative_groups([0.0, 1.0, 1.0], ["alone", "b", "b"]) == ["alone"]


def test_tolerance_bounds_difference_of_highest_and_lowest_reward():
    assert informative_groups([0.0, 0.5e-6, 1e-6], ["a"] * 3) == []
    assert informative_groups([0.0, 0.5e-6, 1.1e-6], ["a"] * 3) == ["a"]
    assert informative_groups([0.0, 0.2], ["a", "a"], tolerance=0.2) == []
    assert informative_groups([0.0, 1e-9], ["a", "a"], tolerance=0.0) == ["a"]


def test_large_equal_rewards_are_equal():
    assert informative_groups([1e9 / 3] * 7, ["a"] * 7) == []


@pytest.mark.parametrize("failed", [None, math.nan, math.inf])
def test_a_failed_rollout_has_no_say(failed):
    # Without the failed one, a is (1, 1), b is (1, 0), and c is nothing at all.
    rewards, uids = [1.0, 1.0, failed, 1.0, 0.0, failed, failed], list("aaabbbc")
    assert informative_groups(rewards, uids) == ["b"]
    assert zero_variance_rows(rewards, uids).tolist() == [True] * 3 + [False] * 3 + [True]


def test_rows_of_a_group_need_not_be_neighbours():
    assert informative_groups([1.0, 5.0, 0.0, 5.0], ["a", "b", "a", "b"]) == ["a"]


def test_a_bad_group_gives_its_place_to_a_copy_of_a_good_one():
    sources = draw_replacements([True, False, True], 0.3, generator())
    assert sources is not None
    assert (sources[0], sources[2]) == (0, 2)
    assert sources[1] in (0, 2)


def test_replacements_are_drawn_from_all_good_groups_and_from_the_generator_alone():
    drawn = []
    for seed in range(20):
        sources, again = (draw_replacements([True, False, True], 0.3, generator(seed)) for _ in range(2))
        assert sources is not None and sources == again
        drawn.append(sources[1])
    assert set(drawn) == {0, 2}


def test_too_few_good_groups_are_refused():
    assert draw_replacements([True, False, True], 2 / 3, generator()) is None  # 2 of 3 is not more than 2/3
    assert draw_replacements([True, False, True], 0.6, generator()) is not None
    assert draw_replacements([False], 0.0, generator()) is None


def test_nothing_changes_where_all_groups_are_good():
    assert draw_replacements([True, True], 0.3, generator()) == [0, 1]


def test_every_rollout_needs_a_reward():
    with pytest.raises(ValueError, match="2 rewards and 1 uids"):
        informative_groups([1.0, 2.0], ["a"])


def test_a_buffer_without_tokens_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        overlong_penalty(torch.tensor([1]), 10, 0, 1.0)
