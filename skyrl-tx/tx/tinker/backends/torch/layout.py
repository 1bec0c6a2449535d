"""Layout of the data of several models in one pass: concatenated, grouped by model.

Co-batched data must not change a bit of a datum's results (float32 on a CPU), so only offsets depend on them, and these
are multiples of `BLOCK`:

- A model's tokens are padded to a multiple of `BLOCK` rows. Elementwise kernels process vectors of 32 numbers and
  compute a remainder differently; matrix products treat fewer than 4 rows differently, and depend on memory alignment.
- Attention pads each datum to a length that depends on its own length only, and batches data of equal padded length.

Padding follows the data of the same model and copies it, so that non-finite numbers stay within their model.

Shapes: N tokens of a pass with block padding, S slots of attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from skyrl_train.models.attention import AttentionRule, check_arguments, compute_causal_attention, packed_attention
from skyrl_train.models.packing import PackedRows
from tx.tinker.types import Datum

BLOCK = 32
ATTENTION = "tx_rows"
"""Name under which the attention function is registered with transformers. No mask function is registered for it, so
transformers makes no mask."""


class Segment(NamedTuple):
    """Range of a model's rows within a pass."""

    start: int
    end: int
    """End of the rows, block padding included."""
    num_tokens: int
    """Number of tokens without block padding."""


class Group(NamedTuple):
    """Data of one attention call."""

    start: int
    count: int
    length: int


@dataclass(frozen=True)
class Rows(PackedRows):
    """Row layout for attention; on a CPU: the map from tokens to slots, grouped by padded length."""

    groups_of_slots: list[Group] = field(default_factory=list)
    token_of_slot: torch.Tensor | None = None
    """[S]; a slot of padding holds a token of its own datum. None: slots are tokens."""
    padding: torch.Tensor | None = None
    """Slots that hold no token of their own."""
    slot_of_token: torch.Tensor | None = None
    """[N]; block padding reads a slot of its own model."""
    block_padding: torch.Tensor | None = None
    """Tokens that are block padding."""

    def to_slots(self, x: torch.Tensor) -> torch.Tensor:
        """[N, heads, D] -> [S, heads, D]"""
        if self.token_of_slot is None:
            # With the strides that index_select gives below: which kernel attention takes may depend on them.
            return x.contiguous()
        return Exchange.apply(x, self.token_of_slot, self.slot_of_token, self.block_padding)  # type: ignore[return-value]

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """[S, heads, D] -> [N, heads, D]"""
        if self.token_of_slot is None:
            return x
        return Exchange.apply(x, self.slot_of_token, self.token_of_slot, self.padding)  # type: ignore[return-value]

    def by_rows(self, compute: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """See `PackedRows`. On a CPU each datum is padded to a length that follows from its own alone."""
        if not self.groups_of_slots:
            return super().apply_by_rows(compute, *tensors)
        in_slots = [self.to_slots(x) for x in tensors]
        answers = [
            compute(
                *(
                    x.narrow(0, group.start, group.count * group.length).unflatten(0, (group.count, group.length))
                    for x in in_slots
                )
            ).flatten(0, 1)
            for group in self.groups_of_slots
        ]
        return self.to_tokens(torch.cat(answers))


@dataclass(frozen=True)
class PassLayout:
    """Input of the base model."""

    input_ids: torch.Tensor
    """[1, N]"""
    position_ids: torch.Tensor
    """[1, N]: of each token in its own datum."""
    rows: Rows
    segments: list[Segment]


def compute_padded_length(length: int) -> int:
    """Return the length that attention pads a datum to: at most an eighth more, or the next multiple of `BLOCK`."""
    unit = BLOCK
    # Coarser steps for longer data: there are few distinct lengths, and data of one length share a call.
    while unit * 16 <= length:
        unit *= 2
    return -(-length // unit) * unit


def split_by_tokens(data: Sequence[Datum], num_tokens: int) -> list[list[Datum]]:
    """Split consecutive data into parts of at most `num_tokens` tokens; a longer datum is a separate part."""
    parts: list[list[Datum]] = []
    room = 0
    for datum in data:
        if not parts or len(datum.tokens) > room:
            parts.append([])
            room = num_tokens
        parts[-1].append(datum)
        room -= len(datum.tokens)
    return parts


def micro_batches(data: Sequence[Datum], num_tokens: int, num_ranks: int = 1) -> list[list[Datum]]:
    """Split a request into micro-batches, by length alone, of at most `num_tokens` on each of the ranks."""
    parts = split_by_tokens(data, num_tokens)
    return [list(chain(*parts[i : i + num_ranks])) for i in range(0, len(parts), num_ranks)]


def build_layout(data_of_models: Sequence[Sequence[Datum]], device: torch.device) -> PassLayout:
    """Lay out data sequentially, in the given order."""
    ids, lengths, segments, starts = [], [], [], []
    at = 0
    for data in data_of_models:
        start = at
        for datum in data:
            starts.append(at)
            lengths.append(len(datum.tokens))
            ids.append(datum.tokens)
            at += len(datum.tokens)
        block_padding = -(at - start) % BLOCK
        segments.append(Segment(start, at + block_padding, at - start))
        # A datum of its own, with positions from 0: attention on a GPU takes block padding as a row that no other row
        # sees.
        if block_padding:
            lengths.append(block_padding)
            starts.append(at)
            ids.append(np.full(block_padding, data[0].tokens[0]))
            at += block_padding
    positions = [np.arange(length) for length in lengths]
    return PassLayout(
        torch.from_numpy(np.concatenate(ids).astype(np.int64))[None].to(device),
        torch.from_numpy(np.concatenate(positions))[None].to(device),
        _build_rows(starts, lengths, segments, at, device),
        segments,
    )


def _build_rows(
    starts: list[int], lengths: list[int], segments: list[Segment], total: int, device: torch.device
) -> Rows:
    boundaries = torch.tensor([*starts, total], dtype=torch.int32, device=device)
    if device.type != "cpu":
        return Rows(tuple(lengths), boundaries)
    # On a CPU block padding takes no part in attention: it reads the answer at its model's first token, and its
    # gradient is 0.
    block_padding_of = {
        segment.start + segment.num_tokens: segment for segment in segments if segment.num_tokens % BLOCK
    }
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(starts, lengths, strict=True):
        if start not in block_padding_of:
            # Across models: attention gives a datum the same bits in any batch, if its padded length is the same.
            by_length.setdefault(compute_padded_length(length), []).append((start, length))
    groups, tokens, padding = [], [], []
    slot_of_token = np.zeros(total, np.int64)
    at = 0
    for padded, ranks in by_length.items():
        groups.append(Group(at, len(ranks), padded))
        for start, length in ranks:
            # Padding follows the datum, so causal attention ignores it.
            slots = np.full(padded, start)
            slots[:length] = np.arange(start, start + length)
            tokens.append(slots)
            slot_of_token[start : start + length] = np.arange(at, at + length)
            padding.append(np.arange(at + length, at + padded))
            at += padded
    token_of_slot = np.concatenate(tokens)
    # Nothing to move, as in a pass of one datum without block padding: each layer saves the copies to slots and back.
    if not block_padding_of and np.array_equal(token_of_slot, np.arange(total)):
        return Rows(tuple(lengths), boundaries, groups_of_slots=groups)
    block_padding = []
    for start, segment in block_padding_of.items():
        slot_of_token[start : segment.end] = slot_of_token[segment.start]
        block_padding.append(np.arange(start, segment.end))
    return Rows(
        tuple(lengths),
        boundaries,
        groups_of_slots=groups,
        token_of_slot=torch.from_numpy(token_of_slot),
        padding=torch.from_numpy(np.concatenate(padding)),
        slot_of_token=torch.from_numpy(slot_of_token),
        block_padding=torch.from_numpy(np.concatenate([*block_padding, np.zeros(0, np.int64)])),
    )


class Exchange(torch.autograd.Function):
    """Rows of x by index. The gradient uses the inverse index, so no sums are needed; it is zero for copied rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forth: torch.Tensor, back: torch.Tensor, copies: torch.Tensor):
        ctx.save_for_backward(back, copies)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        back, copies = ctx.saved_tensors
        # Overwritten and not multiplied by 0, which would leave NaN where the gradient is not finite.
        return gradient.index_select(0, back).index_fill_(0, copies, 0.0), None, None, None


def compute_rows_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: Rows,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention among the tokens of each datum; transformers' calling convention.

    Args:
        query, key, value: [1, heads, N, D], keys and values with as many heads or fewer.

    Returns: [1, N, heads, D], and None for the attention weights

    Raises:
        ValueError: the model asks for something that is not computed here.
    """
    if query.device.type != "cpu":
        return packed_attention(
            *(module, query, key, value, attention_mask),
            packed_rows=packed_rows,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
            **others,
        )
    check_arguments(module, attention_mask, **others)
    # Read by the check at loading, which compares what the layers ask for with the config.
    packed_rows.windows.append(sliding_window)
    packed_rows.softcaps.append(softcap)
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    in_slots = [packed_rows.to_slots(x[0].transpose(0, 1)) for x in (query, key, value)]
    answers = []
    for group in packed_rows.groups_of_slots:
        q, k, v = (
            x.narrow(0, group.start, group.count * group.length)
            .unflatten(0, (group.count, group.length))
            .transpose(1, 2)
            for x in in_slots
        )
        answers.append(compute_causal_attention(q, k, v, rule).transpose(1, 2).flatten(0, 1))
    answer = packed_rows.to_tokens(answers[0] if len(answers) == 1 else torch.cat(answers))
    return answer[None].contiguous(), None


AttentionInterface.register(ATTENTION, compute_rows_attention)
