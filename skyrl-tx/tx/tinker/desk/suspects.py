"""Which piece of work kills the engine? Found by running fewer and fewer of those that were under way when it died.

Knows nothing of what the pieces are. Work that saw two deaths is suspected; then half of the suspects run and nothing
else, so of n it takes log2(n) further deaths to find the one, and all others are done.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

DEATHS_TO_BE_SUSPECTED = 2


class Suspects(Generic[T]):
    def __init__(self) -> None:
        self._deaths: Counter[T] = Counter()
        self._suspects: list[T] = []
        self._trial: set[T] = set()

    def may_run(self, item: T) -> bool:
        return not self._trial or item in self._trial

    def died(self, running: Iterable[T]) -> T | None:
        """The engine died while these were under way. Returns the guilty one if it is found."""
        running, guilty = list(running), None
        if self._trial:
            tried = [item for item in running if item in self._trial]
            if tried and len(self._trial) == 1:
                guilty = tried[0]
                self._suspects.remove(guilty)
                del self._deaths[guilty]
            elif tried:
                self._suspects = tried
        else:
            self._deaths.update(running)
            self._suspects = [item for item in running if self._deaths[item] >= DEATHS_TO_BE_SUSPECTED]
        self._next_trial()
        return guilty

    def finished(self, item: T) -> bool:
        """It is done, however. Returns whether others may run now that might not before."""
        del self._deaths[item]
        if item not in self._suspects:
            return False
        self._suspects.remove(item)
        self._trial.discard(item)
        if self._trial:
            return False
        self._next_trial()
        return True

    def _next_trial(self) -> None:
        self._trial = set(self._suspects[: (len(self._suspects) + 1) // 2])
