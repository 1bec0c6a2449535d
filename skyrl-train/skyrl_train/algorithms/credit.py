"""Credit over the steps of a trajectory, where every step is a row of the batch (step-wise training).

An estimator knows rows and columns. So the rewards of a trajectory's steps are laid out as one row of a matrix with a
column a step, the estimator judges that matrix as it would judge tokens, and every step gets its value back. What a
step is worth thus depends on the whole trajectory, and never on how many tokens its steps have.

Shapes: B rows (steps), M trajectories, K steps of the longest one.
"""

from collections.abc import Hashable, Sequence

import torch

from skyrl_train.algorithms.advantages import group_numbers


def step_numbers(trajectory_ids: Sequence[Hashable]) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of each row's trajectory (by first appearance) and of its step in it (by order of rows), int64 [B]."""
    seen: dict[Hashable, int] = {}
    steps = []
    for name in trajectory_ids:
        steps.append(seen.get(name, 0))
        seen[name] = steps[-1] + 1
    return group_numbers(trajectory_ids), torch.tensor(steps, dtype=torch.int64)


def trajectory_matrix(
    rewards_B: torch.Tensor, trajectory_B: torch.Tensor, step_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange rewards of rows in a matrix of trajectories and steps.

    Args:
        rewards_B: [B], of a row's whole response.
        trajectory_B, step_B: [B] int64, from 0: the row and the column of each.

    Returns:
        rewards [M, K] and the mask [M, K] of cells that a row stands in; 0 elsewhere.

    Raises:
        ValueError: two rows claim the same step of a trajectory.
    """
    num_trajectories, num_steps = _size(trajectory_B), _size(step_B)
    # Cells are counted instead of set: a count above 1 is a step that two rows claim.
    cells = trajectory_B * num_steps + step_B
    mask = torch.bincount(cells, minlength=num_trajectories * num_steps)
    if (mask > 1).any():
        raise ValueError("two rows of the batch are the same step of the same trajectory")
    rewards = rewards_B.new_zeros(num_trajectories, num_steps)
    rewards[trajectory_B, step_B] = rewards_B
    return rewards, mask.view(num_trajectories, num_steps).to(rewards.dtype)


def rows_of_matrix(values: torch.Tensor, trajectory_B: torch.Tensor, step_B: torch.Tensor) -> torch.Tensor:
    """Gather for each row of the batch, [B], its entry of a matrix [M, K]: the inverse of `trajectory_matrix`."""
    return values[trajectory_B, step_B]


def _size(numbers: torch.Tensor) -> int:
    return int(numbers.max()) + 1 if len(numbers) else 0
