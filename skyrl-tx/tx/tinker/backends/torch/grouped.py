"""Products of the adapters of all parts of a layer by one call each (`torch.nn.functional.grouped_mm`), not by one for
each part: the number of kernels does not grow with the number of models and experts.

Shapes: N rows of parts that follow each other, T parts, r rank.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import grouped_mm

from tx.tinker.backends.torch.parts import Part

ALIGNMENT = 16
"""Bytes that strides of the operands must be a multiple of."""


class PartGroup(NamedTuple):
    """Parts that are computed together."""

    parts: Sequence[Part]
    rows: slice
    ends: torch.Tensor
    """[T] int32, of each part's rows, counted from the first row."""
    a: torch.Tensor
    """[T, r, in]"""
    b: torch.Tensor
    """[T, r, out]"""

    @property
    def scaling(self) -> float:
        return self.parts[0].scaling

    @property
    def columns(self) -> slice:
        return self.parts[0].columns


def group_parts(parts: Sequence[Part]) -> tuple[list[PartGroup], list[Part]]:
    """Return groups of parts with the same rank and columns and contiguous rows, and the remaining parts: single ones,
    and unaligned widths or ranks.
    """
    groups, rest = [], []
    for members in _split_runs(parts):
        a, b = (torch.stack([getattr(part.matrices, side) for part in members]) for side in "ab")
        sizes = (a.shape[1], a.shape[2], b.shape[2])
        if len(members) == 1 or any(size * a.element_size() % ALIGNMENT for size in sizes):
            rest += members
            continue
        start = members[0].start
        ends = torch.tensor([part.end - start for part in members], dtype=torch.int32, device=a.device)
        groups.append(PartGroup(members, slice(start, members[-1].end), ends, a, b))
    return groups, rest


def add_adapters(y: torch.Tensor, x: torch.Tensor, group: PartGroup) -> torch.Tensor:
    """Add scaling B A x to the group's rows of y, in place. Returns: scaling A x, [N, r]."""
    low = grouped_mm(x[group.rows], group.a.transpose(1, 2), offs=group.ends).mul_(group.scaling)
    y[group.rows, group.columns] += grouped_mm(low, group.b, offs=group.ends)
    return low


def add_gradients(
    group: PartGroup, x: torch.Tensor, low: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor | None
) -> None:
    """Run the backward of `add_adapters`: adds to the gradient of each part, and to dx if required, in place.

    Args:
        x, dy, dx: of all rows of the layer.
        low: from `add_adapters`.
    """
    x, dy = x[group.rows], dy[group.rows, group.columns].contiguous()
    back = grouped_mm(dy, group.b.transpose(1, 2), offs=group.ends).mul_(group.scaling)
    _add_to([part.gradient.a for part in group.parts if part.gradient], grouped_mm(back.t(), x, offs=group.ends))
    _add_to([part.gradient.b for part in group.parts if part.gradient], grouped_mm(low.t(), dy, offs=group.ends))
    if dx is not None:
        dx[group.rows] += grouped_mm(back, group.a, offs=group.ends)


def _split_runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Split parts by rank and columns, and where the rows of one do not begin where those before end."""

    def kind(part: Part) -> tuple[int, int, int]:
        columns = part.columns
        return part.matrices.a.shape[0], columns.start or 0, -1 if columns.stop is None else columns.stop

    runs: list[list[Part]] = []
    for _, of_kind in groupby(sorted(parts, key=lambda part: (kind(part), part.start)), kind):
        members = list(of_kind)
        cuts = [i for i, (a, b) in enumerate(pairwise(members), 1) if a.end != b.start]
        runs += [members[start:end] for start, end in pairwise([0, *cuts, len(members)])]
    return runs


def _add_to(totals: list[torch.Tensor], found: torch.Tensor) -> None:
    """Add each part's product; experts may share a matrix, and it may be kept in another format."""
    are_apart = len({total.data_ptr() for total in totals}) == len(totals)
    if totals and are_apart and totals[0].dtype == found.dtype:
        torch._foreach_add_(totals, list(found.unbind()))  # pyright: ignore[reportPrivateImportUsage]
        return
    for total, each in zip(totals, found.unbind(), strict=bool(totals)):
        total.add_(each)
