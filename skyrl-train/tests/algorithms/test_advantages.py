"""Advantages by hand. (`test_advantage_properties.py` compares them with plain loops, and tries to upset them.)"""

import pytest
import torch

from skyrl_train.algorithms.advantages import (
    compute_group_numbers,
    compute_turn_numbers,
    count_negative_groups,
    gae_advantages,
    grpo_advantages,
    maxrl_advantages,
    normalize_advantages,
    reinforce_advantages,
    reinforce_baseline_advantages,
    rloo_advantages,
    turn_grpo_advantages,
)

ONES = torch.ones(4, 2)


def rewards_at_the_end(*scores: float) -> torch.Tensor:
    return torch.tensor([[0.0, score] for score in scores])


def test_grpo_compares_sample_with_group():
    # Group a: 1 and 0, mean 0.5, sample std sqrt(0.5). Group b: 3 and 3, no difference.
    advantages, returns = grpo_advantages(rewards_at_the_end(1, 0, 3, 3), ONES, ["a", "a", "b", "b"])
    expected = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([expected, -expected, 0.0, 0.0]))
    assert torch.equal(advantages, returns)
    assert torch.equal(advantages[:, 0], advantages[:, 1])


def test_rloo_compares_sample_with_rest_of_group():
    # Scores 1, 0, 5 against the means of the others: 2.5, 3, 0.5.
    advantages, returns = rloo_advantages(rewards_at_the_end(1, 0, 5), torch.ones(3, 2), ["a", "a", "a"])
    torch.testing.assert_close(advantages[:, 0], torch.tensor([-1.5, -3.0, 4.5]))
    assert torch.equal(advantages, returns)


def test_groups_are_numbered_by_first_appearance():
    assert compute_group_numbers(["x", "y", "x", "z"]).tolist() == [0, 1, 0, 2]


def test_normalized_advantages_ignore_masked_tokens():
    values = torch.tensor([[1.0, float("nan")], [3.0, 1e9]])
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    # Mean 2, sample variance 2.
    expected = torch.tensor([[-(0.5**0.5), 0.0], [0.5**0.5, 0.0]])
    torch.testing.assert_close(normalize_advantages(values, mask), expected)


def test_single_advantage_is_normalized_to_zero():
    assert normalize_advantages(torch.tensor([[5.0, 7.0]]), torch.tensor([[1.0, 0.0]])).tolist() == [[0.0, 0.0]]
    assert normalize_advantages(torch.tensor([[5.0, 7.0]]), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


def test_equal_scores_have_zero_advantage_at_any_scale():
    # In float32 the mean of seven times 0.1 is not 0.1, and a rounding error over a std of 0 is a large advantage.
    for score in (0.1, 1e9 / 3):
        advantages, _ = grpo_advantages(rewards_at_the_end(*[score] * 7), torch.ones(7, 2), ["a"] * 7)
        assert torch.equal(advantages, torch.zeros(7, 2))


@pytest.mark.parametrize("score", [0.5, 0.7, 123.456, 1e9 / 3])
def test_reinforce_advantage_is_zero_for_equal_scores(score):
    """Answers of different lengths: all tokens have the same return, so the mean must equal it."""
    lengths = torch.tensor([3, 7, 11, 2, 9, 5, 13, 4])
    positions = torch.arange(13)
    mask = (positions < lengths[:, None]).float()
    rewards = torch.where(positions == lengths[:, None] - 1, score, 0.0)
    advantages, _ = reinforce_advantages(rewards, mask, mask)
    assert torch.equal(advantages, torch.zeros(8, 13))


def test_small_rewards_keep_precision_next_to_large_rewards():
    # 1e8 + 1 - 1e8 is 0 in float32, which would make the two samples equal.
    rewards = torch.tensor([[1e8, 1.0, -1e8], [0.0, 0.0, 0.0]])
    advantages, _ = rloo_advantages(rewards, torch.ones(2, 3), ["a", "a"])
    assert advantages[:, 0].tolist() == [1.0, -1.0]


def test_maxrl_divides_by_success_rate():
    # One of four succeeds: mean 1/4, so (1 - 1/4) / (1/4) = 3 and (0 - 1/4) / (1/4) = -1.
    advantages, returns = maxrl_advantages(rewards_at_the_end(1, 0, 0, 0), ONES, ["a"] * 4)
    assert advantages[:, 0].tolist() == [3.0, -1.0, -1.0, -1.0]
    assert torch.equal(advantages, returns)


def test_maxrl_gives_zero_without_success_or_for_negative_rewards():
    rewards = rewards_at_the_end(0, 0, -3, 1)
    advantages, _ = maxrl_advantages(rewards, ONES, ["none", "none", "negative", "negative"])
    assert torch.equal(advantages, torch.zeros(4, 2))
    assert count_negative_groups(rewards, ONES, ["none", "none", "negative", "negative"]) == 1


def test_reinforce_baseline_centres_per_group_and_scales_per_batch():
    # Groups (1, 0) and (9, 3), centred: 0.5, -0.5, 3, -3. The first row has two tokens, the others one, so of the five
    # tokens 0.5, 0.5, -0.5, 3, -3 the mean is 0.1, the squares 0.16 + 0.16 + 0.36 + 8.41 + 9.61 = 18.7, over 4: 4.675.
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.0, 99.0], [9.0, 99.0], [3.0, 99.0]])
    advantages, returns = reinforce_baseline_advantages(rewards, mask, mask, list("aabb"))
    assert returns.tolist() == [[0.5, 0.5], [-0.5, 0.0], [3.0, 0.0], [-3.0, 0.0]]
    std = 4.675**0.5
    expected = torch.tensor([[0.4, 0.4], [-0.6, 0.0], [2.9, 0.0], [-3.1, 0.0]]) / std
    torch.testing.assert_close(advantages, expected)


def test_reinforce_returns_are_discounted_over_action_tokens():
    # Model, model, environment, model, padding. The environment's reward 4 counts for the token before it.
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 99.0]])
    response = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    actions = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]])
    advantages, returns = reinforce_advantages(rewards, response, actions, gamma=0.5)
    # From the end: 8; 2 + 4 + 8/2 = 10; 1 + 10/2 = 6. Mean 8, squares 4 + 4 + 0, variance 4.
    torch.testing.assert_close(returns, torch.tensor([[6.0, 10.0, 0.0, 8.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 1.0, 0.0, 0.0, 0.0]]))


def test_gae_matches_manual_result():
    # Model, environment, model, with values 1, (nobody's 50), 3; gamma 1/2, lambda 1/2; reward 2 on the environment's
    # token and 4 at the end.
    # delta_2 = 4 - 3 = 1                 A_2 = 1              return 1 + 3 = 4
    # delta_1 = 2 + 3/2 - 1 = 2.5         A_1 = 2.5 + 1/4      return 2.75 + 1 = 3.75
    # Normalised: mean 1.875, differences +-0.875, variance 2 * 0.875^2, so +-1/sqrt(2).
    rewards = torch.tensor([[0.0, 2.0, 4.0]])
    actions = torch.tensor([[1.0, 0.0, 1.0]])
    values = torch.tensor([[1.0, 50.0, 3.0]])
    advantages, returns = gae_advantages(rewards, torch.ones(1, 3), actions, values, gamma=0.5, lambd=0.5)
    torch.testing.assert_close(returns, torch.tensor([[3.75, 0.0, 4.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.5**0.5, 0.0, -(0.5**0.5)]]))


def test_gae_without_critic_is_rejected():
    with pytest.raises(ValueError, match="gae"):
        gae_advantages(ONES, ONES, ONES, None)


def test_each_run_of_actions_starts_turn():
    actions = torch.tensor([[1, 1, 0, 0, 1, 0, 1], [0, 1, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 1, 1], [0] * 7]
    assert compute_turn_numbers(actions).tolist() == expected
    assert compute_turn_numbers(actions).dtype == torch.int64


def test_turn_grpo_compares_turns_with_same_index():
    # Turn rewards (1, 4), (3, 8), (2): returns with gamma 1/2 are (3, 4), (7, 8), (2).
    # Turn 0: mean 4, so -1, 3, -2. Turn 1 of two samples: mean 6, so -2, 2.
    rewards = torch.tensor([[1.0, 0.0, 4.0], [0.0, 3.0, 8.0], [2.0, 99.0, 99.0]])
    response = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    turns = torch.tensor([[0, 0, 1], [0, 0, 1], [0, 7, 7]])
    arguments = dict(response_mask=response, turns=turns, index=["a"] * 3, gamma=0.5)
    advantages, returns = turn_grpo_advantages(rewards, **arguments, grpo_norm_by_std=False)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 3.0, 4.0], [7.0, 7.0, 8.0], [2.0, 0.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, -1.0, -2.0], [3.0, 3.0, 2.0], [-2.0, 0.0, 0.0]]))
    # Variances: turn 0 (1 + 9 + 4) / 2 = 7, turn 1 (4 + 4) / 1 = 8.
    divided, _ = turn_grpo_advantages(rewards, **arguments)
    torch.testing.assert_close(divided[:, 0], torch.tensor([-1.0, 3.0, -2.0]) / 7**0.5)
    torch.testing.assert_close(divided[:2, 2], torch.tensor([-2.0, 2.0]) / 8**0.5)
