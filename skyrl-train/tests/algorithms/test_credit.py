"""Credit over the steps of a trajectory."""

import pytest
import torch

from skyrl_train.algorithms.advantages import grpo_advantages, turn_grpo_advantages
from skyrl_train.algorithms.credit import rows_of_matrix, step_numbers, trajectory_matrix

IDS = ["x", "x", "y", "x", "z"]


def test_rows_are_numbered_by_trajectory_and_step():
    trajectory, step = step_numbers(IDS)
    assert trajectory.tolist() == [0, 0, 1, 0, 2]
    assert step.tolist() == [0, 1, 0, 2, 0]


def test_rewards_of_steps_become_a_matrix_of_trajectories():
    rewards, mask = trajectory_matrix(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), *step_numbers(IDS))
    assert rewards.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, 0.0], [5.0, 0.0, 0.0]]
    assert mask.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_every_row_gets_its_cell_back():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    order = [4, 3, 0, 2, 1]
    trajectory, step = (numbers[order] for numbers in step_numbers(IDS))
    matrix, _ = trajectory_matrix(values[order], trajectory, step)
    assert torch.equal(rows_of_matrix(matrix, trajectory, step), values[order])


def test_a_step_may_be_missing():
    _, mask = trajectory_matrix(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.tensor([0, 2]))
    assert mask.tolist() == [[1.0, 0.0, 1.0]]


def test_no_rows_are_no_trajectories():
    rewards, mask = trajectory_matrix(torch.zeros(0), *step_numbers([]))
    assert rewards.shape == mask.shape == (0, 0)


def test_two_rows_cannot_be_the_same_step():
    with pytest.raises(ValueError, match="same step"):
        trajectory_matrix(torch.ones(2), torch.tensor([0, 0]), torch.tensor([1, 1]))


def test_every_step_is_judged_by_its_whole_trajectory():
    """Two trajectories of a prompt: three steps that end with reward 1, two that end with 0. Whatever the numbers of
    steps, the trajectories are two samples: 1 - 1/2 and 0 - 1/2."""
    trajectory, step = step_numbers(["good", "good", "bad", "good", "bad"])
    rewards, mask = trajectory_matrix(torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0]), trajectory, step)
    judged, _ = grpo_advantages(rewards, mask, ["prompt"] * 2, grpo_norm_by_std=False)
    assert rows_of_matrix(judged, trajectory, step).tolist() == [0.5, 0.5, -0.5, 0.5, -0.5]


def test_steps_can_be_compared_with_steps_of_the_same_number():
    trajectory, step = step_numbers(["good", "good", "bad"])
    rewards, mask = trajectory_matrix(torch.tensor([1.0, 4.0, 3.0]), trajectory, step)
    turns = torch.arange(mask.shape[1])
    judged, _ = turn_grpo_advantages(rewards, mask, turns, ["prompt"] * 2, grpo_norm_by_std=False, gamma=0.5)
    # Returns of the first steps 1 + 4/2 = 3 and 3; nobody else has a second step.
    assert rows_of_matrix(judged, trajectory, step).tolist() == [0.0, 0.0, 0.0]
