"""Which rank computes which rows of a batch when. Arithmetic on lengths; knows no process and no model.

A *shard* is a data-parallel share of the work: one rank, or several that share each sequence. All shards go through the
same number of micro-batches, because the ranks of a sharded model meet in every forward: a shard that runs out of rows
divides a micro-batch in two or, if it has none to divide, computes a *filler*, which counts nothing.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from skyrl_train.training_batch import MicroBatch, TensorBatch, TrainingInputBatch

Unit = tuple[int, ...]
"""Rows of the batch that stay together: one, or a pair."""


class Schedule:
    """A batch divided over shards, mini-batches and micro-batches: every row is in one micro-batch that counts.

    The forward-only pass (`whole`) and the training pass (`mini_batches`) take the same micro-batches, so they compute
    the same bits.

    Attributes:
        rows: of each shard, its rows of the batch, int64, mini-batch after mini-batch. A shard without any row holds a
            copy of another's, for fillers.
        mini_batches: [mini-batch][shard] its micro-batches; the same number on every shard.
    """

    def __init__(
        self, rows: list[torch.Tensor], mini_batches: list[list[tuple[MicroBatch, ...]]], num_own: Sequence[int]
    ):
        self.rows = rows
        self.mini_batches = mini_batches
        self._num_own = num_own  # of each shard's rows, those that are not copies for fillers; they come first

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        mini_batches: Sequence[Sequence[int]],
        num_shards: int,
        *,
        micro_batch_size: int,
        max_tokens: int | None = None,
        unit: int = 1,
    ) -> "Schedule":
        """Divides the rows of a batch.

        Args:
            lengths: tokens of each row.
            mini_batches: the rows of each mini-batch. Together they are every row once.
            micro_batch_size: rows of a micro-batch. Shards then take consecutive, nearly equal numbers of rows.
            max_tokens: instead of `micro_batch_size`, the most tokens of a micro-batch (a longer unit stands alone).
                Shards then take nearly equal numbers of tokens.
            unit: so many neighbouring rows of a mini-batch stay together (2 for preference pairs).

        Raises:
            ValueError: the mini-batches are not every row once, or one is not made of whole units.
        """
        if not lengths or sorted(row for rows in mini_batches for row in rows) != list(range(len(lengths))):
            raise ValueError(f"the mini-batches must hold each of {len(lengths)} rows (at least one) exactly once")
        if any(len(rows) % unit for rows in mini_batches):
            raise ValueError(f"a mini-batch must be whole units of {unit} rows; got {[len(r) for r in mini_batches]}")
        bins = []
        for rows in mini_batches:
            units = [tuple(rows[start : start + unit]) for start in range(0, len(rows), unit)]
            if max_tokens is None:
                parts = _consecutive(units, num_shards)
                of_shards = [_of_size(part, max(1, micro_batch_size // unit)) for part in parts]
            else:
                parts = _balanced(units, lengths, num_shards)
                of_shards = [_of_tokens(part, lengths, max_tokens) for part in parts]
            bins.append(_evened_out(of_shards, lengths))
        return cls._placed(bins, lengths, num_shards)

    @classmethod
    def _placed(cls, bins: list[list[list[list[Unit]]]], lengths: Sequence[int], num_shards: int) -> "Schedule":
        """Gives every row its place on its shard. `bins`: [mini-batch][shard][micro-batch] units; none for a filler."""
        rows, num_own = [], []
        schedule: list[list[tuple[MicroBatch, ...]]] = [[] for _ in bins]
        all_units = [unit for of_shards in bins for micros in of_shards for micro in micros for unit in micro]
        for shard in range(num_shards):
            units = [unit for of_shards in bins for micro in of_shards[shard] for unit in micro]
            own = [row for unit in units for row in unit]
            num_own.append(len(own))
            spare = min(units or all_units, key=lambda unit: _tokens(unit, lengths))
            if not units:
                own = list(spare)
            rows.append(torch.tensor(own, dtype=torch.int64))
            place = {row: position for position, row in enumerate(own)}
            for mini_batch, of_shards in zip(schedule, bins, strict=True):
                micros = [_micro_batch(micro or [spare], place, is_filler=not micro) for micro in of_shards[shard]]
                mini_batch.append(tuple(micros))
        return cls(rows, schedule, num_own)

    @property
    def num_shards(self) -> int:
        return len(self.rows)

    def whole(self) -> list[tuple[MicroBatch, ...]]:
        """Of each shard, the micro-batches of all mini-batches, for a forward-only pass."""
        return [
            tuple(micro for mini_batch in self.mini_batches for micro in mini_batch[shard])
            for shard in range(self.num_shards)
        ]

    def shard(self, batch: TrainingInputBatch) -> list[TrainingInputBatch]:
        """The rows of each shard."""
        return [batch.rows(own) for own in self.rows]

    def gather(self, outputs: Sequence[TensorBatch], key: str) -> torch.Tensor:
        """The shards' outputs `key`, a row for each of a shard's rows, in the order of the batch."""
        pairs = zip(outputs, self._num_own, strict=True)
        joined = torch.cat([output.tensor(key)[:num_own] for output, num_own in pairs])
        rows = torch.cat([own[:num_own] for own, num_own in zip(self.rows, self._num_own, strict=True)])
        ordered = torch.empty_like(joined)
        ordered[rows] = joined
        return ordered


def _tokens(rows: Iterable[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def _micro_batch(units: list[Unit], place: dict[int, int], *, is_filler: bool) -> MicroBatch:
    return MicroBatch(tuple(place[row] for unit in units for row in unit), is_filler)


def _consecutive(units: list[Unit], num_shards: int) -> list[list[Unit]]:
    """`num_shards` consecutive parts whose sizes differ by one at most."""
    size, longer = divmod(len(units), num_shards)
    bounds = [shard * size + min(shard, longer) for shard in range(num_shards + 1)]
    return [units[start:end] for start, end in pairwise(bounds)]


def _balanced(units: list[Unit], lengths: Sequence[int], num_shards: int) -> list[list[Unit]]:
    """Parts of nearly equal numbers of tokens: the longest first, each to the part that has least."""
    parts: list[list[Unit]] = [[] for _ in range(num_shards)]
    loads = [(0, 0, shard) for shard in range(num_shards)]  # tokens, units (rows may be empty), shard
    for unit in sorted(units, key=lambda unit: -_tokens(unit, lengths)):
        tokens, count, shard = loads[0]
        parts[shard].append(unit)
        heapq.heapreplace(loads, (tokens + _tokens(unit, lengths), count + 1, shard))
    return parts


def _of_size(units: list[Unit], size: int) -> list[list[Unit]]:
    return [units[start : start + size] for start in range(0, len(units), size)]


def _of_tokens(units: list[Unit], lengths: Sequence[int], max_tokens: int) -> list[list[Unit]]:
    """Bins of at most `max_tokens`; each unit, longest first, goes into the first bin that has room."""
    bins: list[list[Unit]] = []
    room: list[int] = []
    for unit in units:  # `_balanced` left them longest first
        tokens = _tokens(unit, lengths)
        found = next((i for i, free in enumerate(room) if tokens <= free), None)
        if found is None:
            bins.append([unit])
            room.append(max_tokens - tokens)
        else:
            bins[found].append(unit)
            room[found] -= tokens
    return bins


def _evened_out(of_shards: list[list[list[Unit]]], lengths: Sequence[int]) -> list[list[list[Unit]]]:
    """The same number of micro-batches on every shard, at least one; an empty one stands for a filler."""
    most = max(1, *(len(micros) for micros in of_shards))
    for micros in of_shards:
        while len(micros) < most:
            divisible = [i for i, micro in enumerate(micros) if len(micro) > 1]
            if not divisible:
                micros += [[] for _ in range(most - len(micros))]
                break
            largest = max(divisible, key=lambda i: sum(_tokens(unit, lengths) for unit in micros[i]))
            middle = len(micros[largest]) // 2
            micros[largest : largest + 1] = [micros[largest][:middle], micros[largest][middle:]]
    return of_shards
