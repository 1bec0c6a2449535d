"""Detector of repeated turns. Independent of agents."""

from collections.abc import Hashable


class Repetition:
    """Detector of repeated turns. Turns are equal if their calls and results are.

    Args:
        limit: number of equal turns in a row, or of rounds of the same two turns, that count as stuck.
    """

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._turns: list[Hashable] = []

    def add(self, turn: Hashable) -> bool:
        """Add a turn. Returns: True if the agent is stuck."""
        self._turns = [*self._turns, turn][-2 * self.limit :]
        same = self._turns[-self.limit :]
        if len(same) == self.limit and len(set(same)) == 1:
            return True
        even, odd = set(self._turns[::2]), set(self._turns[1::2])
        return len(self._turns) == 2 * self.limit and len(even) == len(odd) == 1

    def clear(self) -> None:
        self._turns = []
