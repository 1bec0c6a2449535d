"""Which piece of work kills the engine? Found by running fewer and fewer of those that were under way when it died.

Knows nothing of what the pieces are. Work that saw four deaths is suspected (processes are also killed for reasons of
others, sometimes in a row); then half of those that saw most deaths run and nothing else, so of n it takes log2(n)
further deaths to find the one, and all others are done. Everything follows from the numbers of deaths: whoever keeps
those can go on after a restart.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

DEATHS_TO_BE_SUSPECTED = 4


class Suspects(Generic[T]):
    def __init__(self) -> None:
        self.deaths: dict[T, int] = {}
        """How many it was under way at; only of work that was at any."""
        self._trial: set[T] = set()

    def recall(self, deaths: Mapping[T, int]) -> None:
        """Numbers of before."""
        self.deaths |= {item: number for item, number in deaths.items() if number}
        self._next_trial()

    def may_run(self, item: T) -> bool:
        return not self._trial or item in self._trial

    def died(self, running: Iterable[T]) -> T | None:
        """The engine died while these were under way. Returns the guilty one if it is found."""
        present = [item for item in running if self.may_run(item)]
        guilty = present[0] if len(self._trial) == 1 and present else None
        if guilty is not None:
            del self.deaths[guilty]
            self.deaths = dict.fromkeys(self.deaths, DEATHS_TO_BE_SUSPECTED - 1)  # they had the wrong company
        else:
            self.deaths |= {item: self.deaths.get(item, 0) + 1 for item in present}
        self._next_trial()
        return guilty

    def finished(self, item: T) -> bool:
        """It is done, however. Returns whether others may run now that might not before."""
        self.deaths.pop(item, None)
        if item not in self._trial:
            return False
        self._trial.remove(item)
        if self._trial:
            return False
        self._next_trial()
        return True

    def _next_trial(self) -> None:
        most = max(self.deaths.values(), default=0)
        suspects = [item for item, number in self.deaths.items() if number == most >= DEATHS_TO_BE_SUSPECTED]
        self._trial = set(suspects[: (len(suspects) + 1) // 2])
