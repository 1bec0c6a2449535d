"""GRPO's advantages, by hand."""

import pytest
import torch

from skyrl_train.algorithms.advantages import (
    AdvantageEstimatorRegistry,
    group_numbers,
    grpo_advantages,
    normalize_advantages,
    rloo_advantages,
)

ONES = torch.ones(4, 2)


def rewards_at_the_end(*scores: float) -> torch.Tensor:
    return torch.tensor([[0.0, score] for score in scores])


def test_grpo_compares_a_sample_with_its_group():
    # Group a: 1 and 0, mean 0.5, sample std sqrt(0.5). Group b: 3 and 3, no difference.
    advantages, returns = grpo_advantages(rewards_at_the_end(1, 0, 3, 3), ONES, ["a", "a", "b", "b"])
    expected = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([expected, -expected, 0.0, 0.0]))
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages[:, 0], advantages[:, 1])


def test_without_std_it_is_the_plain_difference():
    advantages, _ = grpo_advantages(rewards_at_the_end(1, 0, 3, 5), ONES, ["a", "a", "b", "b"], grpo_norm_by_std=False)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([0.5, -0.5, -1.0, 1.0]))


def test_a_group_of_one_has_no_baseline():
    advantages, _ = grpo_advantages(rewards_at_the_end(2.0), torch.ones(1, 2), ["alone"])
    torch.testing.assert_close(advantages, torch.full((1, 2), 2.0 / (1 + 1e-6)))


def test_rloo_compares_a_sample_with_the_others():
    # Scores 1, 0, 5 against the means of the others: 2.5, 3, 0.5.
    advantages, returns = rloo_advantages(rewards_at_the_end(1, 0, 5), torch.ones(3, 2), ["a", "a", "a"])
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.5, -3.0, 4.5]))
    assert torch.equal(advantages, returns)


def test_rloo_has_nothing_to_say_of_a_sample_alone():
    advantages, _ = rloo_advantages(rewards_at_the_end(2, 1, 3), torch.ones(3, 2), ["alone", "b", "b"])
    assert advantages[:, 0].tolist() == [0.0, -2.0, 2.0]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_constant_added_to_a_groups_rewards_changes_nothing(name):
    estimator = AdvantageEstimatorRegistry.get(name)
    plain, _ = estimator(token_level_rewards=rewards_at_the_end(1, 0, 3, 5), response_mask=ONES, index=list("aabb"))
    lifted, _ = estimator(token_level_rewards=rewards_at_the_end(8, 7, 1, 3), response_mask=ONES, index=list("aabb"))
    torch.testing.assert_close(lifted, plain)


def test_the_order_of_rows_does_not_matter():
    rewards, uids = rewards_at_the_end(1, 0, 3, 5), ["a", "a", "b", "b"]
    advantages, _ = grpo_advantages(rewards, ONES, uids)
    order = [2, 0, 3, 1]
    shuffled, _ = grpo_advantages(rewards[order], ONES, [uids[i] for i in order])
    torch.testing.assert_close(shuffled, advantages[order])


def test_padding_gets_nothing():
    mask = torch.tensor([[1.0, 0.0]] * 4)
    advantages, _ = grpo_advantages(rewards_at_the_end(1, 0, 3, 5), mask, list("aabb"))
    assert torch.equal(advantages[:, 1], torch.zeros(4))


def test_groups_are_numbered_by_first_appearance():
    assert group_numbers(["x", "y", "x", "z"]).tolist() == [0, 1, 0, 2]


def test_normalized_advantages_ignore_what_is_masked():
    values = torch.tensor([[1.0, float("nan")], [3.0, 1e9]])
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    # Mean 2, sample variance 2.
    expected = torch.tensor([[-(0.5**0.5), 0.0], [0.5**0.5, 0.0]])
    torch.testing.assert_close(normalize_advantages(values, mask), expected)
