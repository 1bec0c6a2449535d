"""Order of one model's requests: early arrivals wait for their predecessors."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

FURTHEST_AHEAD = 10_000
"""A seq further beyond the next one than this is a mistake: no client has so many calls under way."""


class GivenUp(NamedTuple, Generic[T]):
    """Gap that was abandoned."""

    missing: range
    """Seqs that never arrived."""
    stranded: list[T]
    """The requests that waited for them."""


@dataclass
class _Early(Generic[T]):
    item: T | None
    since: float


class Sequencer(Generic[T]):
    """
    Args:
        next_seq: every seq below is decided
    """

    def __init__(self, next_seq: int = 0):
        self.next_seq = next_seq
        self._early: dict[int, _Early[T]] = {}

    def knows(self, seq: int) -> bool:
        """Return True if a seq was offered or skipped."""
        return seq < self.next_seq or seq in self._early

    def too_far(self, seq: int) -> bool:
        """Return True if a seq is negative or too far ahead."""
        return seq < 0 or seq > self.next_seq + FURTHEST_AHEAD

    def offer(self, seq: int, item: T | None, now: float) -> list[T]:
        """Add a request, or None for a refused one, which only uses up its seq. Returns: due requests, in order."""
        if self.knows(seq):
            raise ValueError(f"seq {seq} was already submitted")
        self._early[seq] = _Early(item, now)
        due = []
        while (early := self._early.pop(self.next_seq, None)) is not None:
            self.next_seq += 1
            if early.item is not None:
                due.append(early.item)
        return due

    def give_up(self, waiting_since_before: float) -> GivenUp[T] | None:
        """Skip the first gap if it has blocked a request since before this moment, together with the directly following
        requests: they may be chunks of one batch with the missing ones, and wrong without them.
        """
        if not self._early:
            return None
        start = end = min(self._early)
        while end in self._early:
            end += 1
        if min(self._early[seq].since for seq in range(start, end)) > waiting_since_before:
            return None
        missing = range(self.next_seq, start)
        self.next_seq = end
        return GivenUp(missing, self._remove_waiting(range(start, end)))

    def drain(self) -> list[T]:
        """Remove and return all waiting requests."""
        return self._remove_waiting(sorted(self._early))

    def waiting(self) -> list[T]:
        """Return all waiting requests."""
        return [early.item for early in self._early.values() if early.item is not None]

    @property
    def num_waiting(self) -> int:
        return len(self._early)

    def _remove_waiting(self, seqs: range | list[int]) -> list[T]:
        return [item for seq in seqs if (item := self._early.pop(seq).item) is not None]
