"""Matrices of an adapter in a layer, and the rows of a pass that they are for.

Shapes: r rank, E experts of a layer.
"""

from typing import NamedTuple

import torch


class Matrices(NamedTuple):
    a: torch.Tensor
    """[r, in], of experts [E, r, in], or [r, in] if they share it"""
    b: torch.Tensor
    """[r, out], so B transposed: some products with it are several times faster so; of experts [E, r, out], or
    [r, out]"""

    def of_expert(self, expert: int) -> "Matrices":
        return Matrices(*(matrix if matrix.dim() == 2 else matrix[expert] for matrix in self))


class Part(NamedTuple):
    """A model's share in a layer during a pass."""

    start: int
    end: int
    matrices: Matrices
    scaling: float
    gradient: Matrices | None
    """Added to in the backward. None: nothing is wanted."""
    columns: slice = slice(None)
    """Columns of the layer's output that the adapter adds to."""
