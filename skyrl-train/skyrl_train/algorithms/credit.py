"""Credit assignment over the steps of a trajectory when each step is a batch row (step-wise training).

The rewards of a trajectory's steps form one row of a matrix with one column per step. The estimator treats that matrix
like tokens, and each step gets its value back. So the advantage of a step depends on the whole trajectory, and not on
the number of tokens in its steps.

Shapes: B rows (steps), M trajectories, K steps of the longest one.
"""

from collections.abc import Hashable, Sequence

import torch

from skyrl_train.algorithms.advantages import compute_group_numbers


def compute_step_numbers(trajectory_ids: Sequence[Hashable]) -> tuple[torch.Tensor, torch.Tensor]:
    """Number trajectories (by first appearance) and the steps of each (by order of rows): two int64 [B]."""
    seen: dict[Hashable, int] = {}
    steps = []
    for name in trajectory_ids:
        steps.append(seen.get(name, 0))
        seen[name] = steps[-1] + 1
    return compute_group_numbers(trajectory_ids), torch.tensor(steps, dtype=torch.int64)


def build_trajectory_matrix(
    rewards_B: torch.Tensor, trajectory_B: torch.Tensor, step_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange rewards of rows in a matrix of trajectories and steps.

    Args:
        rewards_B: [B], of a row's whole response.
        trajectory_B, step_B: [B] int64, from 0: matrix row and column of each batch row.

    Returns:
        rewards [M, K] and the mask [M, K] of occupied cells; 0 elsewhere.

    Raises:
        ValueError: two rows have the same step of a trajectory.
    """
    num_trajectories, num_steps = _get_size(trajectory_B), _get_size(step_B)
    # Cells are counted instead of set, so that duplicate steps have a count above 1.
    cells = trajectory_B * num_steps + step_B
    mask = torch.bincount(cells, minlength=num_trajectories * num_steps)
    if (mask > 1).any():
        raise ValueError("the batch has two rows for the same step of the same trajectory")
    rewards = rewards_B.new_zeros(num_trajectories, num_steps)
    rewards[trajectory_B, step_B] = rewards_B
    return rewards, mask.view(num_trajectories, num_steps).to(rewards.dtype)


def gather_rows(values: torch.Tensor, trajectory_B: torch.Tensor, step_B: torch.Tensor) -> torch.Tensor:
    """Gather the entry of each batch row, [B], from a matrix [M, K]: the inverse of `build_trajectory_matrix`."""
    return values[trajectory_B, step_B]


def _get_size(numbers: torch.Tensor) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0
