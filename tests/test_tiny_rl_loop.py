from pathlib import Path

import pytest
import torch
from composed_scripts import load_script

FILE = Path(__file__).parents[1] / "examples" / "tiny" / "rl_loop.py"


@pytest.fixture(scope="module")
def rl_loop():
    return load_script(FILE)


def test_response_is_rewarded_per_position(rl_loop):
    prompts = torch.tensor([[4, 9, 3, 0, 10]] * 3)
    responses = torch.tensor([[0, 3, 4, 9], [0, 3, 9, 4], [4, 9, 3, 0]])
    assert rl_loop.judge(prompts, responses).tolist() == [1.0, 0.5, 0.0]


def test_advantages_are_relative_to_group(rl_loop):
    advantages = rl_loop.group_advantages(torch.tensor([1.0, 0.0, 5.0, 5.0]), group_size=2)
    half = 0.5**0.5  # the group (1, 0): mean 0.5, deviation 0.5 * sqrt(2)
    assert torch.allclose(advantages, torch.tensor([half, -half, 0.0, 0.0]), atol=1e-4)


def test_loss_of_single_token(rl_loop):
    def loss(ratio, advantage):
        log_probs = torch.tensor([[ratio]]).log()
        zeros = torch.zeros_like(log_probs)
        return rl_loop.clipped_loss(log_probs, zeros, torch.tensor([advantage]), rl_loop.Settings()).item()

    assert loss(1.0, 1.0) == pytest.approx(-1.0)
    assert loss(2.0, 1.0) == pytest.approx(-1.28)
    assert loss(0.5, -1.0) == pytest.approx(0.8)


def test_file_stays_short():
    assert len(FILE.read_text().splitlines()) <= 150


def test_reward_increases(rl_loop):
    """40 small steps from random numbers: the first responses are right in one place of eleven."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        curve = rl_loop.train(rl_loop.Settings(num_steps=40, num_prompts=32, group_size=8))
    finally:
        torch.set_num_threads(threads)
    assert sum(curve[:5]) / 5 < 0.15
    assert sum(curve[-5:]) / 5 > 0.25
