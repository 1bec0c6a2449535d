"""The clipped loss, one token at a time and in a batch."""

import math

import pytest
import torch

from skyrl_train.algorithms.losses import PolicyLossRegistry, ppo_policy_loss, register_policy_loss
from skyrl_train.config import AlgorithmConfig


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, -1.0),  # on policy: the plain policy gradient
        (2.0, 1.0, -1.2),  # already made much likelier: clipped, so no further push
        (0.5, 1.0, -0.5),  # made less likely by mistake: not clipped, it may recover
        (0.5, -1.0, 0.8),  # already made much less likely: clipped
        (2.0, -1.0, 2.0),  # a bad token got likelier: full penalty
    ],
)
def test_ppo_loss_of_one_token(ratio: float, advantage: float, expected: float):
    loss, _ = ppo_policy_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), AlgorithmConfig()
    )
    torch.testing.assert_close(loss, torch.tensor([[expected]]))


def test_clip_bounds_are_set_apart():
    config = AlgorithmConfig(eps_clip_low=0.2, eps_clip_high=0.28)
    loss, metrics = ppo_policy_loss(torch.tensor([[math.log(2.0)]]), torch.zeros(1, 1), torch.ones(1, 1), config)
    torch.testing.assert_close(loss, torch.tensor([[-1.28]]))
    assert metrics["clip_ratio"].item() == 1.0


def test_a_clipped_token_has_no_gradient_and_a_free_one_has_that_of_its_log_prob():
    log_probs = torch.tensor([[math.log(2.0), 0.0]], requires_grad=True)
    loss, _ = ppo_policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1, 2), AlgorithmConfig())
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, -1.0]]))


def test_a_user_registers_a_loss_once_and_an_unknown_name_gets_the_nearest():
    @register_policy_loss("test_reinforce")
    def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        return -advantages * log_probs, {}

    try:
        assert PolicyLossRegistry.get("test_reinforce") is reinforce
        with pytest.raises(ValueError, match="already registered"):
            register_policy_loss("test_reinforce")(reinforce)
        with pytest.raises(ValueError, match="did you mean 'test_reinforce'"):
            PolicyLossRegistry.get("test_reinforc")
    finally:
        PolicyLossRegistry.unregister("test_reinforce")
    assert "test_reinforce" not in PolicyLossRegistry.list_available()
