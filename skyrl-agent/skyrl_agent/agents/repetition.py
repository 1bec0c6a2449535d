"""Notices an agent that goes round in a circle. Knows no agent."""

from collections.abc import Hashable


class Repetition:
    """Turns are equal if what was done and what came of it are equal.

    Args:
        limit: so many equal turns in a row, or so many rounds of the same two turns, are a circle.
    """

    def __init__(self, limit: int = 4) -> None:
        self.limit = limit
        self._turns: list[Hashable] = []

    def add(self, turn: Hashable) -> bool:
        """True: the agent is stuck."""
        self._turns = [*self._turns, turn][-2 * self.limit :]
        same = self._turns[-self.limit :]
        if len(same) == self.limit and len(set(same)) == 1:
            return True
        even, odd = set(self._turns[::2]), set(self._turns[1::2])
        return len(self._turns) == 2 * self.limit and len(even) == len(odd) == 1

    def clear(self) -> None:
        self._turns = []
