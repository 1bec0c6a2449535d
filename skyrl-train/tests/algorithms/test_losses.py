"""Surrogates with the ratio pi / pi_old, one token at a time (`test_gradients.py` has the formula of every loss); and
what every loss owes to its batch."""

import math
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.losses import (
    PolicyLossRegistry,
    TokenSelectorRegistry,
    ppo_policy_loss,
    register_policy_loss,
)
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
def test_single_token_ppo_loss(ratio: float, advantage: float, expected: float):
    loss, metrics = ppo_policy_loss(
        torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([[advantage]]), AlgorithmConfig()
    )
    torch.testing.assert_close(loss, torch.tensor([[expected]]))
    assert metrics["clip_ratio"].item() == float(expected != -ratio * advantage)


def test_gspo_uses_sequence_ratio_and_token_gradients():
    # Token ratios 4 and 1/2, their geometric mean sqrt(2) = 1.414: clipped at 1.2 for A > 0, kept for A < 0.
    log_ratios = [[math.log(4.0), math.log(0.5), 100.0]] * 2
    log_probs = torch.tensor(log_ratios, requires_grad=True)
    advantages = torch.tensor([[1.0] * 3, [-1.0] * 3])
    mask = torch.tensor([[1.0, 1.0, 0.0]] * 2)
    loss, metrics = PolicyLossRegistry.get("gspo")(log_probs, torch.zeros(2, 3), advantages, AlgorithmConfig(), mask)
    torch.testing.assert_close(loss[:, :2].detach(), torch.tensor([[-1.2, -1.2], [2**0.5, 2**0.5]]))
    assert metrics["clip_ratio"][:, :2].tolist() == [[1.0, 1.0], [0.0, 0.0]]
    (loss * mask).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[0.0, 0.0, 0.0], [2**0.5, 2**0.5, 0.0]]))


OURS = [
    name
    for name in PolicyLossRegistry.list_available()
    if PolicyLossRegistry.get(name).__module__.startswith("skyrl_train.")
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("absent", ["advantages", "rollout_logprobs"])
def test_requirements_list_mandatory_columns(name: str, absent: str):
    columns: dict[str, Any] = dict.fromkeys(("log_probs", "old_log_probs", "advantages", "loss_mask"), torch.ones(2, 1))
    columns |= {"rollout_logprobs": torch.ones(2, 1), absent: None}
    if name in TokenSelectorRegistry:
        columns["selected_tokens"] = torch.zeros(2, 1, dtype=torch.bool)
    requires = PolicyLossRegistry.get_requirements(name)
    needs = requires.advantages if absent == "advantages" else requires.rollout_log_probs
    if needs:
        with pytest.raises((AttributeError, ValueError)):
            PolicyLossRegistry.get(name)(config=AlgorithmConfig(), **columns)
    else:
        loss, _ = PolicyLossRegistry.get(name)(config=AlgorithmConfig(), **columns)
        assert torch.isfinite(loss).all()


def test_loss_registration_is_unique_and_suggests_nearest_name():
    @register_policy_loss("test_reinforce")
    def reinforce(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        return -advantages * log_probs, {}

    try:
        assert PolicyLossRegistry.get("test_reinforce") is reinforce
        with pytest.raises(ValueError, match="already registered"):
            register_policy_loss("test_reinforce")(reinforce)
        with pytest.raises(ValueError, match="test_reinforce"):
            PolicyLossRegistry.get("test_reinforc")
    finally:
        PolicyLossRegistry.unregister("test_reinforce")
    assert "test_reinforce" not in PolicyLossRegistry.list_available()
