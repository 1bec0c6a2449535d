"""Layout of the rows of a micro-batch for the model, packed without padding or padded, and its inverse.

Shapes: B rows, T columns (prompts padded on the left, responses on the right), R response columns, N real tokens, M
scored response tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from skyrl_train.distributed.ulysses import SequenceParallel
from skyrl_train.utils.device_copies import copy_fields_to_device, copy_to_device

_SHORTEST_PREFIX = 16
"""Minimum length of a shared prefix: the first tokens of a chat template are not worth an attention call."""


class RowGroup(NamedTuple):
    """Consecutive rows of similar length with prefixes of equal length."""

    start: int
    """Index of the first own token of the first row."""

    lengths: tuple[int, ...]
    """Own tokens of each row."""

    prefix: int = 0
    """Tokens of each row's prefix, which are stored in another row."""

    keys_start: int = 0
    """Index in `PackedRows.keys` of the first row's first key."""


@dataclass(frozen=True)
class PackedRows:
    """Lengths and positions of packed rows, for attention.

    Rows with a common prefix form a tree: the first row stores the prefix, the others store only the remaining tokens
    and attend to it there.
    """

    lengths: tuple[int, ...]
    """Own tokens of each row: all, or those after its shared prefix."""

    boundaries: torch.Tensor
    """[rows + 1] int32: start of each row, and end of the last."""

    sequence_parallel: SequenceParallel | None = None
    windows: list[int | None] = field(default_factory=list)
    """Sliding window of each attention layer that saw these rows, in order; read by `check_scoring`."""
    softcaps: list[float | None] = field(default_factory=list)
    """Score cap of each such layer."""

    prefixes: tuple[int, ...] = ()
    """Length of each row's shared prefix. Empty: no sharing."""

    keys: torch.Tensor | None = None
    """Token indices that each row attends to, row by row: its prefix and its own tokens. None: only own tokens."""

    @cached_property
    def num_keys(self) -> tuple[int, ...]:
        """Number of tokens that the last token of each row attends to."""
        if not self.prefixes:
            return self.lengths
        return tuple(prefix + length for prefix, length in zip(self.prefixes, self.lengths, strict=True))

    @cached_property
    def key_boundaries(self) -> torch.Tensor:
        """[rows + 1] int32: start of each row's keys, and end of the last."""
        if not self.prefixes:
            return self.boundaries
        return torch.tensor([0, *self.num_keys]).cumsum(0).to(self.boundaries.device, torch.int32)

    @cached_property
    def groups(self) -> list[RowGroup]:
        """Rows in groups that waste at most a fifth of a row on padding. Few groups, because rows are sorted longest
        first.
        """
        prefixes = self.prefixes or (0,) * len(self.lengths)
        groups: list[RowGroup] = []
        start, keys_start, members, prefix = 0, 0, [self.lengths[0]], prefixes[0]
        for length, own_prefix in zip(self.lengths[1:], prefixes[1:], strict=True):
            if 0.8 * max(*members, length) > min(*members, length) or own_prefix != prefix:
                groups.append(RowGroup(start, tuple(members), prefix, keys_start))
                start, keys_start = start + sum(members), keys_start + sum(members) + prefix * len(members)
                members, prefix = [], own_prefix
            members.append(length)
        return [*groups, RowGroup(start, tuple(members), prefix, keys_start)]

    def apply_by_rows(self, compute: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Apply a causal function of rows to tensors of all tokens. Requires rows without shared prefixes, on one rank.

        Args:
            compute: maps tensors [G, L, …] of rows of similar length, padded at the end, to [G, L, …].
            tensors: [N, …]
        Returns: [N, …]
        """
        answers = []
        for group in self.groups:
            own = (x.narrow(0, group.start, sum(group.lengths)).flatten(1)[None] for x in tensors)
            batch = [
                to_batch(x, group.lengths)[:, 0].unflatten(2, y.shape[1:]) for x, y in zip(own, tensors, strict=True)
            ]
            # Padding follows each row, where a causal function never looks.
            answer = compute(*batch)
            answers.append(from_batch(answer.flatten(2)[:, None], group.lengths)[0].unflatten(1, answer.shape[2:]))
        return torch.cat(answers)


class _SharedPrefixes(NamedTuple):
    """Prompt prefixes that several rows of a batch share. The first such row stores them."""

    lengths: torch.Tensor
    """[B]: tokens of each row that are stored in an earlier one."""

    last: torch.Tensor
    """[B]: index of the last of these tokens; -1 without any."""

    order: torch.Tensor
    """[B]: rows in storage order: by length of the prefix, then longest first."""

    of_rows: tuple[int, ...]
    """`lengths` of the rows with own tokens, in order."""

    keys: torch.Tensor
    """Indices of all tokens of these rows."""

    def find_predictors(self, scored: torch.Tensor, row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the indices whose hidden states predict scored tokens [M]: the previous token or, for the first own
        token of a row, the last token of its prefix.

        Args:
            scored: their indices.
            row, position: [M] batch row and position in that row of each.
        """
        return torch.where(position == self.lengths[row], self.last[row], scored - 1)


@dataclass(frozen=True)
class Layout:
    """A micro-batch in the model's layout, with the mapping of results to the batch. With sequence parallelism the
    first four fields and `cells` are this rank's slice of the tokens."""

    input_ids: torch.Tensor
    """[b, n]: [1, N] packed, [B, T] padded."""

    position_ids: torch.Tensor
    """[b, n]: position of each token in its row."""

    real: torch.Tensor
    """[b n] bool: 0 on padding."""

    attention_mask: torch.Tensor | None
    """[b, n], None if packed."""

    rows: PackedRows | None
    """None if padded."""

    predictors: torch.Tensor
    """[M]: index in [b n] (over all ranks) of the token before each scored token, whose hidden state predicts it."""

    labels: torch.Tensor
    """[M]: the scored tokens."""

    destinations: torch.Tensor
    """[M]: their indices in the response columns [B R]."""

    shape: tuple[int, int]
    """B and R."""

    cells: torch.Tensor
    """[b n]: index of each token in the batch [B T]; -1 for padding."""

    @cached_property
    def own(self) -> torch.Tensor | None:
        """Indices of the scored tokens that this rank computes; None for all."""
        ranks = self.rows and self.rows.sequence_parallel
        if ranks is None:
            return None
        # Slices are equal and consecutive, so an index divided by their length is the rank that holds it.
        return (self.predictors // self.input_ids.numel() == ranks.rank).nonzero()[:, 0]

    def to(self, device: torch.device) -> "Layout":
        """Return the layout with its tensors on a device."""
        return self if self.input_ids.device == device else copy_fields_to_device(self, device)

    def build_inputs(self) -> dict[str, Any]:
        """Return the arguments of a transformers model."""
        inputs = dict(input_ids=self.input_ids, position_ids=self.position_ids, attention_mask=self.attention_mask)
        return inputs if self.rows is None else inputs | dict(packed_rows=self.rows)

    def gather_from_batch(self, values: torch.Tensor, fill: int) -> torch.Tensor:
        """Gather values [B, T, ...] of the batch in the order of this layout's tokens, [b n, ...].

        Args:
            fill: value of padding.
        """
        taken = values.flatten(0, 1).index_select(0, self.cells.clamp(min=0))
        taken[self.cells < 0] = fill
        return taken

    def scatter_to_batch(self, values: torch.Tensor, num_columns: int, fill: int) -> torch.Tensor:
        """Scatter values [b n, ...] of this layout's tokens to the batch, [B, T, ...]. A collective with sequence
        parallelism, where each rank passes its slice.

        Args:
            num_columns: T.
            fill: value of cells without a token.
        """
        cells, ranks = self.cells, self.rows and self.rows.sequence_parallel
        if ranks is not None:
            cells, values = ranks.gather(cells, 0), ranks.gather(values, 0)
        whole = values.new_full((self.shape[0] * num_columns, *values.shape[1:]), fill)
        is_token = cells >= 0
        whole[cells[is_token]] = values[is_token]
        return whole.unflatten(0, (self.shape[0], num_columns))

    def select_scored(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the hidden states, from [b, n, H], that predict the scored tokens of this rank, and these tokens."""
        hidden = hidden.flatten(0, 1)
        if self.own is None:
            return hidden.index_select(0, self.predictors), self.labels
        # `predictors` are indices over all ranks; the remainder is the index in this rank's slice.
        return hidden.index_select(0, self.predictors[self.own] % len(hidden)), self.labels[self.own]

    def select_scored_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Select the scored tokens of this rank from response columns [B, R, ...], in their order."""
        selected = columns.flatten(0, 1).index_select(0, self.destinations)
        return selected if self.own is None else selected[self.own]

    def scatter_scored(self, values: torch.Tensor) -> torch.Tensor:
        """Scatter values [M, ...] of scored tokens to [B, R, ...], 0 at padding. A collective with sequence
        parallelism."""
        if self.own is not None:
            assert self.rows is not None and self.rows.sequence_parallel is not None
            # Ranks own different numbers of scored tokens, but a gather needs equal shapes: values are padded to the
            # largest number.
            ranks = self.rows.sequence_parallel
            owners = self.predictors // self.input_ids.numel()
            counts = owners.bincount(minlength=ranks.size)
            width = max(1, int(counts.max()))
            filled = torch.cat([values, values.new_zeros(width - len(values), *values.shape[1:])])
            # Every rank gets all values and computes the same loss; the gather's backward returns its own gradients to
            # each.
            is_value = torch.arange(width, device=owners.device) < counts[:, None]
            by_owner = ranks.gather(filled, 0)[is_value.flatten()]
            values = by_owner.index_select(0, owners.argsort(stable=True).argsort())
        # Not a view of a flat tensor: FSDP hooks into module outputs, and warns of views. index_put out of place: its
        # backward reaches `values`, and unwritten cells stay an exact 0.
        rows, columns = self.destinations // self.shape[1], self.destinations % self.shape[1]
        return values.new_zeros(*self.shape, *values.shape[1:]).index_put((rows, columns), values)


def pack_rows(
    sequences: torch.Tensor,
    attention_mask: torch.Tensor,
    num_response: int,
    sequence_parallel: SequenceParallel | None = None,
    multiple_of: int = 1,
    share_prefixes: bool = False,
) -> Layout:
    """Pack real tokens without padding, longest row first (so that rows of similar length are adjacent for
    `PackedRows.groups`). A batch without tokens, or with a number that the ranks do not divide, gets a row of padding.

    Args:
        sequences, attention_mask: [B, T]; the last `num_response` columns are the response.
        multiple_of: pad to a multiple of this number of tokens.
        share_prefixes: store prompt prefixes that several rows share only once.
    """
    layout = _pack_tokens(sequences, attention_mask.bool(), num_response, share_prefixes)
    if sequence_parallel is None:
        return _pad_tokens(layout, multiple_of)
    return _slice_for_rank(_pad_tokens(layout, sequence_parallel.size), sequence_parallel)


def _pack_tokens(sequences: torch.Tensor, mask: torch.Tensor, num_response: int, share_prefixes: bool) -> Layout:
    """Pack real tokens on one rank. See `pack_rows`."""
    shared = _find_shared_prefixes(sequences, mask, num_response) if share_prefixes else None
    # Stable, so that rows of equal length keep their order and the same batch gives the same numbers on every run.
    order = mask.sum(dim=1).argsort(descending=True, stable=True) if shared is None else shared.order
    sequences, mask = sequences[order], mask[order]
    positions = mask.cumsum(dim=1) - 1
    if shared is not None:
        # Tokens stored in another row are not stored here; positions still count them.
        mask = mask & (positions >= shared.lengths[order, None])
    # Empty rows are dropped here: attention kernels reject a length of 0.
    lengths = [length for length in mask.sum(dim=1).tolist() if length]
    # The column of each token within the response: negative in the prompt.
    columns = torch.arange(-mask.shape[1], 0, device=mask.device) + num_response
    input_ids, position_ids = sequences[mask], positions[mask]
    width = mask.shape[1]
    # The first token of a row has no predecessor: it is not scored.
    scored = (mask & (positions > 0) & (columns >= 0))[mask].nonzero()[:, 0]
    predictors, prefixes, keys = scored - 1, (), None
    if shared is not None:
        prefixes, keys = shared.of_rows, shared.keys
        rows = order[:, None].expand_as(mask)[mask]
        predictors = shared.find_predictors(scored, rows[scored], position_ids[scored])
    # variable-length attention kernels need int32
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(mask.device, torch.int32)
    return Layout(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        real=torch.ones_like(input_ids, dtype=torch.bool),
        attention_mask=None,
        rows=PackedRows(tuple(lengths), boundaries, prefixes=prefixes, keys=keys),
        predictors=predictors,
        labels=input_ids[scored],
        # `order` maps sorted rows to batch rows
        destinations=(order[:, None] * num_response + columns)[mask][scored],
        shape=(mask.shape[0], num_response),
        cells=(order[:, None] * width + torch.arange(width, device=mask.device))[mask],
    )


def _pad_tokens(layout: Layout, unit: int) -> Layout:
    """Add a row of padding so that the number of tokens is a nonzero multiple of `unit`."""
    rows, num_tokens = layout.rows, layout.input_ids.numel()
    # Also a batch without tokens gets a row: its rank must join the others in every forward and backward.
    padding = -num_tokens % unit if num_tokens else unit
    if not padding or rows is None:
        return layout
    places = torch.arange(padding, device=layout.input_ids.device)
    prefixes, keys = rows.prefixes, rows.keys
    if keys is not None:
        prefixes, keys = (*prefixes, 0), torch.cat([keys, num_tokens + places])
    return replace(
        layout,
        input_ids=F.pad(layout.input_ids, (0, padding)),
        position_ids=torch.cat([layout.position_ids, places[None]], dim=1),
        real=F.pad(layout.real, (0, padding)),
        cells=F.pad(layout.cells, (0, padding), value=-1),
        # A separate row: real tokens do not attend to it.
        rows=replace(
            rows,
            lengths=(*rows.lengths, padding),
            boundaries=torch.cat([rows.boundaries, rows.boundaries[-1:] + padding]),
            prefixes=prefixes,
            keys=keys,
        ),
    )


def _slice_for_rank(layout: Layout, ranks: SequenceParallel) -> Layout:
    """Return this rank's slice of the tokens."""
    assert layout.rows is not None
    return replace(
        layout,
        input_ids=ranks.shard(layout.input_ids, 1),
        position_ids=ranks.shard(layout.position_ids, 1),
        real=ranks.shard(layout.real, 0),
        cells=ranks.shard(layout.cells, 0),
        rows=replace(layout.rows, sequence_parallel=ranks),
    )


class PrefixOrder(NamedTuple):
    """Rows of a batch sorted by their tokens, so that each follows a row with the longest common prefix. Among rows
    with a common prefix, the one with the shortest prompt is first: its response may be a part of the other prompts
    (branches of a conversation), and only prompts are shared."""

    rows: list[int]
    """Rows in this order."""

    shared: list[int]
    """For each batch row, the number of prompt tokens shared with the previous row in this order."""


def compute_prefix_order(sequences: torch.Tensor, attention_mask: torch.Tensor, num_response: int) -> PrefixOrder:
    """Sort rows [B, T] by their tokens; the last `num_response` columns are the response."""
    mask = attention_mask.bool()
    return _compute_prefix_order(_extract_rows(sequences, mask), mask, num_response)


def _extract_rows(sequences: torch.Tensor, mask: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    return [row[is_token].cpu().numpy() for row, is_token in zip(sequences, mask, strict=True)]


def _compute_prefix_order(rows: list[np.ndarray[Any, Any]], mask: torch.Tensor, num_response: int) -> PrefixOrder:
    num_prompt = mask[:, : mask.shape[1] - num_response].sum(dim=1).tolist()
    by_tokens = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    common = [_count_common(rows[before], rows[row]) for before, row in pairwise(by_tokens)]
    order = _sort_shortest_prompts_first(by_tokens, common, num_prompt)
    lengths = [0] * len(rows)
    for before, row in pairwise(order):
        num_shared = min(_count_common(rows[before], rows[row]), num_prompt[row])
        lengths[row] = num_shared if num_shared >= _SHORTEST_PREFIX else 0
    return PrefixOrder(order, lengths)


def _count_common(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> int:
    """Return the length of the common prefix."""
    num_compared = min(len(left), len(right))
    differs = left[:num_compared] != right[:num_compared]
    return int(differs.argmax()) if differs.any() else num_compared


def _sort_shortest_prompts_first(by_tokens: list[int], common: list[int], num_prompt: list[int]) -> list[int]:
    """Reorder the prefix tree of sorted rows: among the subtrees of each node, the one with the shortest prompt is
    first.

    Args:
        common: number of tokens that each row but the first has in common with the previous one.
    """

    def merge_subtrees(subtrees: list[tuple[int, list[int]]]) -> tuple[int, list[int]]:
        ordered = sorted(subtrees, key=lambda subtree: subtree[0])  # stable: equal ones stay sorted by tokens
        return ordered[0][0], [row for _, rows in ordered for row in rows]

    # The nodes from the root to the current row: tokens of each, and its completed subtrees.
    path: list[tuple[int, list[tuple[int, list[int]]]]] = [(-1, [])]
    subtrees = [(num_prompt[row], [row]) for row in by_tokens]
    complete = subtrees[0]
    for depth, leaf in zip(common, subtrees[1:], strict=True):
        while path[-1][0] > depth:
            complete = merge_subtrees([*path.pop()[1], complete])
        if path[-1][0] < depth:
            path.append((depth, []))
        path[-1][1].append(complete)
        complete = leaf
    while path:
        complete = merge_subtrees([*path.pop()[1], complete])
    return complete[1]


def _find_shared_prefixes(sequences: torch.Tensor, mask: torch.Tensor, num_response: int) -> _SharedPrefixes | None:
    """Find prompt prefixes that several rows share, or None."""
    rows = _extract_rows(sequences, mask)
    by_tokens, lengths = _compute_prefix_order(rows, mask, num_response)
    if not any(lengths):
        return None
    # Rows with prefixes of equal length are adjacent: attention computes them in one call.
    order = sorted(range(len(rows)), key=lambda row: (lengths[row], -len(rows[row])))
    num_own = [len(tokens) - length for tokens, length in zip(rows, lengths, strict=True)]
    starts = dict(zip(order, accumulate((num_own[row] for row in order), initial=0), strict=False))
    places: dict[int, np.ndarray[Any, Any]] = {}
    path = np.zeros(0, np.int64)
    for row in by_tokens:
        # The previous row starts with this one's prefix, wherever its tokens are stored.
        path = np.concatenate([path[: lengths[row]], starts[row] + np.arange(num_own[row])])
        places[row] = path
    holders = [row for row in order if num_own[row]]
    return _SharedPrefixes(
        lengths=torch.tensor(lengths, device=mask.device),
        last=torch.tensor([int(places[row][n - 1]) if n else -1 for row, n in enumerate(lengths)], device=mask.device),
        order=torch.tensor(order, device=mask.device),
        of_rows=tuple(lengths[row] for row in holders),
        keys=torch.from_numpy(np.concatenate([places[row] for row in holders])).to(mask.device),
    )


def pad_rows(sequences: torch.Tensor, attention_mask: torch.Tensor, num_response: int) -> Layout:
    """Keep rows padded, without the columns that are padding in every row.

    Args:
        sequences, attention_mask: [B, T]; the last `num_response` columns are the response.
    """
    num_rows, num_columns = sequences.shape
    # Padding may hold any value, but embeddings accept only valid ids.
    sequences = torch.where(attention_mask.bool(), sequences, 0)
    cells = torch.arange(num_rows * num_columns, device=sequences.device).view(num_rows, num_columns)
    cells, _, _ = trim_padding(cells, attention_mask, num_response)
    sequences, attention_mask, num_used = trim_padding(sequences, attention_mask, num_response)
    mask = attention_mask.bool()
    positions = mask.cumsum(dim=1) - 1
    width = mask.shape[1]
    columns = torch.arange(width, device=mask.device) - (width - num_used)
    rows, at = (mask & (positions > 0) & (columns >= 0)).nonzero(as_tuple=True)
    return Layout(
        input_ids=sequences,
        # Left padding has position -1, which is not in any position table.
        position_ids=positions.clamp(min=0),
        real=mask.flatten(),
        attention_mask=attention_mask,
        rows=None,
        predictors=rows * width + at - 1,
        labels=sequences[rows, at],
        destinations=rows * num_response + columns[at],
        shape=(num_rows, num_response),
        cells=torch.where(mask, cells, -1).flatten(),
    )


def trim_padding(
    sequences: torch.Tensor, attention_mask: torch.Tensor, num_response: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Drop the columns that are padding in every row.

    Args:
        sequences, attention_mask: [B, T], prompts padded on the left, responses (the last `num_response` columns) on
            the right.

    Returns:
        both without those columns, and the number of remaining response columns (at least 1).
    """
    used = attention_mask.bool().any(dim=0)
    columns = used.nonzero()
    if len(columns) == 0:
        return sequences, attention_mask, num_response
    num_prompt = sequences.shape[1] - num_response
    # At least one column of prompt and one of response are kept, so that shapes are never empty.
    first = min(int(columns[0]), num_prompt - 1)
    last = max(int(columns[-1]) + 1, num_prompt + 1)
    return sequences[:, first:last], attention_mask[:, first:last], last - num_prompt


# ---- rows as batches


def to_batch(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[heads, tokens, D] -> [G, heads, L, D], 0 at padding."""
    num_rows, longest = len(lengths), max(lengths)
    by_token = x.transpose(0, 1)
    if sum(lengths) < num_rows * longest:
        room = by_token.new_zeros(num_rows * longest, *by_token.shape[1:])
        by_token = room.index_copy(0, _compute_slots(lengths, x.device), by_token)
    return by_token.unflatten(0, (num_rows, longest)).transpose(1, 2)


def from_batch(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[G, heads, L, D] -> [heads, tokens, D]."""
    by_token = x.transpose(1, 2).flatten(0, 1)
    if sum(lengths) < len(by_token):
        by_token = by_token.index_select(0, _compute_slots(lengths, x.device))
    return by_token.transpose(0, 1)


def _compute_slots(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the index of each token in [G L], for rows of these lengths."""
    is_token = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return copy_to_device(torch.from_numpy(np.flatnonzero(is_token)), device)
