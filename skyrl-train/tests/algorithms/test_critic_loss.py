"""The critic's clipped squared error, one token at a time."""

import pytest
import torch

from skyrl_train.algorithms.critic_loss import critic_loss
from skyrl_train.config import AlgorithmConfig

CONFIG = AlgorithmConfig(value_clip=0.5)


@pytest.mark.parametrize(
    ("value", "old", "target", "expected", "slope", "clipped"),
    [
        (1.2, 1.0, 3.0, 1.62, -1.8, 0),  # moved by 0.2, within the clip: (1.2 - 3)^2 / 2
        (2.0, 1.0, 3.0, 1.125, 0.0, 1),  # moved by 1 towards the return: as if by 0.5, (1.5 - 3)^2 / 2, no further push
        (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # moved away: full error, (0 - 3)^2 / 2
        (4.0, 1.0, 3.0, 1.125, 0.0, 1),  # overshot by 1: the clipped error, 1.5, is larger
        (6.0, 1.0, 3.0, 4.5, 3.0, 0),  # overshot by 3: it is called back
    ],
)
def test_single_value_error(value, old, target, expected, slope, clipped):
    values = torch.tensor([[value]], requires_grad=True)
    loss, metrics = critic_loss(values, torch.tensor([[old]]), torch.tensor([[target]]), CONFIG)
    torch.testing.assert_close(loss.detach(), torch.tensor([[expected]]))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[slope]]))
    assert metrics["values_clipfrac"].item() == clipped


def test_wide_clip_equals_squared_error():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(4, 5, generator=generator) for _ in range(3))
    loss, metrics = critic_loss(values, old, returns, AlgorithmConfig(value_clip=1e9))
    torch.testing.assert_close(loss, (values - returns) ** 2 / 2)
    assert metrics["values_clipfrac"].sum() == 0


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_masked_values_do_not_affect_loss_or_gradient(garbage):
    values = torch.tensor([[0.0, garbage]], requires_grad=True)
    other = torch.tensor([[1.0, garbage]])
    loss, _ = critic_loss(values, other, other * 2, CONFIG, torch.tensor([[1, 0]]))
    loss.sum().backward()
    assert loss.tolist() == [[2.0, 0.0]]
    assert values.grad is not None and values.grad.tolist() == [[-2.0, 0.0]]


def test_half_precision_is_computed_in_float32():
    value, zero = torch.tensor([[1.0078125]]).bfloat16(), torch.zeros(1, 1).bfloat16()
    loss, _ = critic_loss(value, value, zero, CONFIG)
    assert loss.item() == 1.0078125**2 / 2  # bfloat16 would have rounded it to 0.5078125
