"""Schedule of the rows of a batch: data-parallel rank, mini-batch and micro-batch of each row, computed from lengths.

A *data-parallel rank* is one process, or several that share each sequence. All compute the same number of
micro-batches, since the ranks of a sharded model synchronize in every forward: a rank without further rows splits a
micro-batch in two or, if none can be split, computes a *dummy micro-batch* of weight 0.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from skyrl_train.models.packing import PrefixOrder
from skyrl_train.training_batch import MicroBatch, TensorBatch, TrainingInputBatch

Unit = tuple[int, ...]
"""Rows of the batch that stay together: one, or a pair."""


class Schedule:
    """Division of a batch over data-parallel ranks, mini-batches and micro-batches. Every row is in exactly one
    non-dummy micro-batch.

    The forward-only pass (`whole`) and the training pass (`mini_batches`) use the same micro-batches, so they compute
    the same bits.

    Attributes:
        rows: [data-parallel rank] its rows of the batch, int64, ordered by mini-batch. A rank without rows has a copy
            of another rank's row, for dummy micro-batches.
        mini_batches: [mini-batch][data-parallel rank] micro-batches; the same number on every rank.
    """

    def __init__(
        self,
        rows: list[torch.Tensor],
        mini_batches: list[list[tuple[MicroBatch, ...]]],
        num_own: Sequence[int],
        num_rows: int,
    ):
        self.rows = rows
        self.mini_batches = mini_batches
        self._num_own = num_own  # rows of each rank that are not copies for dummies; these are first
        self._num_rows = num_rows

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        mini_batches: Sequence[Sequence[int]],
        data_parallel_size: int,
        *,
        micro_batch_size: int,
        max_tokens: int | None = None,
        unit: int = 1,
        prefixes: PrefixOrder | None = None,
    ) -> "Schedule":
        """Divide the rows of a batch.

        Args:
            lengths: tokens of each row.
            mini_batches: the rows of each mini-batch. Together they contain every row once.
            micro_batch_size: rows of a micro-batch. Ranks then get consecutive rows, in nearly equal numbers.
            max_tokens: instead of `micro_batch_size`, the maximum tokens of a micro-batch (a longer unit forms its
                own). Ranks then get nearly equal numbers of tokens.
            unit: number of consecutive rows of a mini-batch that stay together (2 for preference pairs).
            prefixes: prefix order, for models that compute a common prefix of a micro-batch's rows once. With
                `max_tokens`, such rows are then grouped if that saves micro-batches, and the prefix counts once.

        Raises:
            ValueError: the mini-batches do not contain every row once, or one has incomplete units.
        """
        if not lengths or sorted(row for rows in mini_batches for row in rows) != list(range(len(lengths))):
            raise ValueError(f"the mini-batches must contain each of {len(lengths)} rows (at least one) exactly once")
        if any(len(rows) % unit for rows in mini_batches):
            raise ValueError(
                f"a mini-batch must be a multiple of units of {unit} rows; got {[len(r) for r in mini_batches]}"
            )
        bins = []
        for rows in mini_batches:
            units = [tuple(rows[start : start + unit]) for start in range(0, len(rows), unit)]
            if max_tokens is None:
                units_by_rank = _split_consecutively(units, data_parallel_size)
                micro_batches = [_chunk(own, max(1, micro_batch_size // unit)) for own in units_by_rank]
            else:
                units_by_rank = _split_by_tokens(units, lengths, data_parallel_size)
                micro_batches = [_pack(own, lengths, max_tokens) for own in units_by_rank]
                if prefixes is not None and any(prefixes.shared) and unit == 1:
                    sharing = _pack_sharing(rows, lengths, prefixes, data_parallel_size, max_tokens)
                    micro_batches = min(sharing, micro_batches, key=lambda by_rank: max(map(len, by_rank)))
            bins.append(_fill_with_dummies(micro_batches, lengths))
        return cls._from_bins(bins, lengths, data_parallel_size)

    @classmethod
    def of_micro_batches(cls, by_rank: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> "Schedule":
        """Build the schedule of given micro-batches, for a forward-only pass over some rows of a batch.

        Args:
            by_rank: [data-parallel rank][micro-batch] rows. Ranks with fewer micro-batches get dummies.
            lengths: tokens of each row of the batch.
        """
        most = max(map(len, by_rank))
        bins: list[list[list[Unit]]] = [
            [[(row,) for row in rows] for rows in own] + [[] for _ in range(most - len(own))] for own in by_rank
        ]
        return cls._from_bins([bins], lengths, len(by_rank))

    @classmethod
    def _from_bins(
        cls, bins: list[list[list[list[Unit]]]], lengths: Sequence[int], data_parallel_size: int
    ) -> "Schedule":
        """Build a schedule by numbering the rows of each rank. `bins`: [mini-batch][data-parallel rank][micro-batch]
        units; empty for a dummy."""
        rows, num_own = [], []
        schedule: list[list[tuple[MicroBatch, ...]]] = [[] for _ in bins]
        all_units = [unit for by_rank in bins for micros in by_rank for micro in micros for unit in micro]
        for rank in range(data_parallel_size):
            units = [unit for by_rank in bins for micro in by_rank[rank] for unit in micro]
            own = [row for unit in units for row in unit]
            num_own.append(len(own))
            spare = min(units or all_units, key=lambda unit: _tokens(unit, lengths))
            if not units:
                own = list(spare)
            rows.append(torch.tensor(own, dtype=torch.int64))
            positions = {row: position for position, row in enumerate(own)}
            for mini_batch, by_rank in zip(schedule, bins, strict=True):
                micros = [
                    _build_micro_batch(micro or [spare], positions, is_dummy=not micro) for micro in by_rank[rank]
                ]
                mini_batch.append(tuple(micros))
        return cls(rows, schedule, num_own, len(lengths))

    @property
    def data_parallel_size(self) -> int:
        return len(self.rows)

    def merge_mini_batches(self) -> list[tuple[MicroBatch, ...]]:
        """Return the micro-batches of all mini-batches for each rank, for a forward-only pass."""
        return [
            tuple(micro for mini_batch in self.mini_batches for micro in mini_batch[rank])
            for rank in range(self.data_parallel_size)
        ]

    def rows_of_micro_batches(self) -> list[list[tuple[int, ...]]]:
        """Return the rows of the batch in each micro-batch of each rank, without dummies."""
        return [
            [tuple(own[list(micro.rows)].tolist()) for micro in micros if not micro.is_dummy]
            for own, micros in zip(self.rows, self.merge_mini_batches(), strict=True)
        ]

    def split(self, batch: TrainingInputBatch) -> list[TrainingInputBatch]:
        """Return the rows of each rank."""
        return [batch.rows(own) for own in self.rows]

    def gather(self, outputs: Sequence[TensorBatch], key: str) -> torch.Tensor:
        """Concatenate the ranks' outputs `key`, one per row, in the order of the batch; 0 for rows that are in no
        micro-batch."""
        pairs = zip(outputs, self._num_own, strict=True)
        by_rank = torch.cat([output.tensor(key)[:num_own] for output, num_own in pairs])
        rows = torch.cat([own[:num_own] for own, num_own in zip(self.rows, self._num_own, strict=True)])
        ordered = by_rank.new_zeros(self._num_rows, *by_rank.shape[1:])
        ordered[rows] = by_rank
        return ordered


def _tokens(rows: Iterable[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def _build_micro_batch(units: list[Unit], positions: dict[int, int], *, is_dummy: bool) -> MicroBatch:
    return MicroBatch(tuple(positions[row] for unit in units for row in unit), is_dummy)


def _split_consecutively(units: list[Unit], data_parallel_size: int) -> list[list[Unit]]:
    """Split into consecutive parts whose sizes differ by one at most."""
    size, longer = divmod(len(units), data_parallel_size)
    bounds = [rank * size + min(rank, longer) for rank in range(data_parallel_size + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]


def _split_by_tokens(units: list[Unit], lengths: Sequence[int], data_parallel_size: int) -> list[list[Unit]]:
    """Split into parts with nearly equal numbers of tokens: longest unit first, each to the part with the fewest
    tokens."""
    parts: list[list[Unit]] = [[] for _ in range(data_parallel_size)]
    loads = [(0, 0, rank) for rank in range(data_parallel_size)]  # tokens, units (rows may be empty), rank
    for unit in sorted(units, key=lambda unit: -_tokens(unit, lengths)):
        tokens, count, rank = loads[0]
        parts[rank].append(unit)
        heapq.heapreplace(loads, (tokens + _tokens(unit, lengths), count + 1, rank))
    return parts


def _chunk(units: list[Unit], size: int) -> list[list[Unit]]:
    return [units[start : start + size] for start in range(0, len(units), size)]


def _pack(units: list[Unit], lengths: Sequence[int], max_tokens: int) -> list[list[Unit]]:
    """Pack units into bins of at most `max_tokens`: longest first, each into the first bin with enough space."""
    bins: list[list[Unit]] = []
    free: list[int] = []
    for unit in units:  # `_split_by_tokens` left them longest first
        tokens = _tokens(unit, lengths)
        first = next((i for i, space in enumerate(free) if tokens <= space), None)
        if first is None:
            bins.append([unit])
            free.append(max_tokens - tokens)
        else:
            bins[first].append(unit)
            free[first] -= tokens
    return bins


def _pack_sharing(
    rows: Sequence[int], lengths: Sequence[int], prefixes: PrefixOrder, data_parallel_size: int, max_tokens: int
) -> list[list[list[Unit]]]:
    """Pack rows in prefix order, in which rows with a common prefix are consecutive: first split into nearly equal
    numbers of tokens per rank, then into micro-batches of at most `max_tokens` (a longer row forms its own). Tokens
    shared with the previous row count only if the rows are separated.

    Returns: [data-parallel rank][micro-batch] units of one row.
    """
    chosen, ordered, own, shared = set(rows), [], [], 0
    for row in prefixes.rows:
        # The prefix shared with the last chosen row is the shortest prefix shared by consecutive rows in between.
        shared = min(shared, prefixes.shared[row])
        if row in chosen:
            ordered.append(row)
            own.append(lengths[row] - shared)
            shared = lengths[row]
    part = sum(own) / data_parallel_size
    by_rank: list[list[list[Unit]]] = [[] for _ in range(data_parallel_size)]
    before, room, last_rank = 0, 0, -1
    for row, tokens in zip(ordered, own, strict=True):
        # Assigned by the middle of a row, so that the last rank does not get less than its part.
        rank = min(data_parallel_size - 1, int((before + tokens / 2) / part)) if part else 0
        if rank != last_rank or tokens > room:
            by_rank[rank].append([])
            room, tokens_here = max_tokens, lengths[row]
        else:
            tokens_here = tokens
        by_rank[rank][-1].append((row,))
        room, before, last_rank = room - tokens_here, before + tokens, rank
    return by_rank


def _fill_with_dummies(by_rank: list[list[list[Unit]]], lengths: Sequence[int]) -> list[list[list[Unit]]]:
    """Give every rank the same number of micro-batches, at least one; an empty one represents a dummy."""
    most = max(1, *(len(micros) for micros in by_rank))
    for micros in by_rank:
        while len(micros) < most:
            divisible = [i for i, micro in enumerate(micros) if len(micro) > 1]
            if not divisible:
                micros += [[] for _ in range(most - len(micros))]
                break
            largest = max(divisible, key=lambda i: sum(_tokens(unit, lengths) for unit in micros[i]))
            middle = len(micros[largest]) // 2
            micros[largest : largest + 1] = [micros[largest][:middle], micros[largest][middle:]]
    return by_rank
