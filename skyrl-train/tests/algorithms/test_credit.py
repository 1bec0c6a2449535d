"""Credit over the steps of a trajectory (`trainer/test_batch_preparation.py` has advantages of steps)."""

import pytest
import torch

from skyrl_train.algorithms.credit import build_trajectory_matrix, compute_step_numbers, gather_rows

IDS = ["x", "x", "y", "x", "z"]


def test_rows_are_numbered_by_trajectory_and_step():
    trajectory, step = compute_step_numbers(IDS)
    assert trajectory.tolist() == [0, 0, 1, 0, 2]
    assert step.tolist() == [0, 1, 0, 2, 0]


def test_step_rewards_form_trajectory_matrix():
    rewards, mask = build_trajectory_matrix(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), *compute_step_numbers(IDS))
    assert rewards.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, 0.0], [5.0, 0.0, 0.0]]
    assert mask.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_rows_receive_matrix_cells():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    order = [4, 3, 0, 2, 1]
    trajectory, step = (numbers[order] for numbers in compute_step_numbers(IDS))
    matrix, _ = build_trajectory_matrix(values[order], trajectory, step)
    assert torch.equal(gather_rows(matrix, trajectory, step), values[order])


def test_missing_step_is_allowed():
    _, mask = build_trajectory_matrix(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]), torch.tensor([0, 2]))
    assert mask.tolist() == [[1.0, 0.0, 1.0]]


def test_empty_rows_give_no_trajectories():
    rewards, mask = build_trajectory_matrix(torch.zeros(0), *compute_step_numbers([]))
    assert rewards.shape == mask.shape == (0, 0)


def test_duplicate_step_is_rejected():
    with pytest.raises(ValueError, match="same step"):
        build_trajectory_matrix(torch.ones(2), torch.tensor([0, 0]), torch.tensor([1, 1]))
