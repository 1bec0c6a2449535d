"""Batches that must give the same numbers: in another order, wider, with rubbish where nothing counts, in parts.

Shapes: B rows, R response columns.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from skyrl_train.training_batch import TensorBatch

RUBBISH = {"NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "1e30": 1e30, "0.4": 0.4}


@dataclass(frozen=True)
class Variant:
    """A batch [B, R + padding] that must give what the original gives.

    Attributes:
        invariance: the rule that says so.
        words: what was done, for the person who reads.
        order: [B], the original's row of each of its rows.
        num_left: columns of padding before the original's.
    """

    invariance: str
    words: str
    batch: TensorBatch
    order: torch.Tensor
    num_left: int = 0
    width: int = field(default=0)

    def back(self, output: torch.Tensor) -> torch.Tensor:
        """An output [B, R + padding] of this batch, in the original's order and width [B, R]."""
        restored = torch.empty_like(output)
        restored[self.order] = output
        return restored[:, self.num_left : self.num_left + self.width]


def iter_variants(batch: TensorBatch, masks: Mapping[str, str], *, unit: int = 1) -> Iterator[Variant]:
    """Yield every variant of a batch whose columns are [B] or [B, R].

    Args:
        masks: mask column of each column: {"log_probs": "loss_mask"}. Mask columns are padded with 0 and hold no
            garbage.
        unit: number of consecutive rows that belong together.
    """
    yield from sort_rows(batch, masks, unit)
    yield from pad_columns(batch, masks)
    yield from fill_masked(batch, masks)


def sort_rows(batch: TensorBatch, masks: Mapping[str, str], unit: int) -> Iterator[Variant]:
    units = torch.arange(len(batch)).view(-1, unit)
    shuffled = torch.randperm(len(units), generator=torch.Generator().manual_seed(1))
    width = _get_width(batch, masks)
    for words, order in {"in reverse order": units.flip(0), "shuffled": units[shuffled]}.items():
        order = order.flatten()
        yield Variant("row_order", f"with the rows {words}", batch.rows(order), order, width=width)


def pad_columns(batch: TensorBatch, masks: Mapping[str, str]) -> Iterator[Variant]:
    width, order = _get_width(batch, masks), torch.arange(len(batch))
    for left, right in ((0, 3), (2, 0), (1, 6)):
        wider = {
            name: column if column.dim() < 2 else torch.nn.functional.pad(column, (left, right))
            for name, column in _select_columns(batch)
        }
        words = f"with {left} columns of padding on the left and {right} on the right"
        yield Variant("padding", words, TensorBatch(wider), order, left, width)


def fill_masked(batch: TensorBatch, masks: Mapping[str, str]) -> Iterator[Variant]:
    width, order = _get_width(batch, masks), torch.arange(len(batch))
    for words, rubbish in RUBBISH.items():
        dirty = dict(_select_columns(batch))
        for name, mask in masks.items():
            dirty[name] = torch.where(batch.tensor(mask) != 0, batch.tensor(name), rubbish)
        yield Variant("masked_garbage", f"with {words} where the mask is 0", TensorBatch(dirty), order, width=width)


def split_rows(num_rows: int, unit: int = 1) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
    """(invariance, words, rows of each part): micro-batches of several sizes, and shares of 1, 2 and 4 workers, whose
    rows are dealt out in turn and computed two (or two pairs) at a time."""
    units = torch.arange(num_rows).view(-1, unit)
    for size in (1, 2, 5):
        parts = [part.flatten() for part in units.split(size)]
        yield "micro_batches", f"in micro-batches of {size * unit}", parts
    for num_shares in (1, 2, 4):
        shares = [units[share::num_shares] for share in range(num_shares)]
        parts = [part.flatten() for share in shares for part in share.split(2)]
        yield "data_parallel", f"shared out over {num_shares} workers", parts


def _select_columns(batch: TensorBatch) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, column) for name, column in batch.items() if column is not None)


def _get_width(batch: TensorBatch, masks: Mapping[str, str]) -> int:
    return batch.tensor(next(iter(masks))).shape[1]
