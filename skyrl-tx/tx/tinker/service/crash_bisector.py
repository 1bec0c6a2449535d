"""Bisection of engine crashes: finds the request that crashes the engine by running ever fewer of the suspects.

Items are opaque. An item that was running at four crashes is suspected (processes are also killed for unrelated
reasons, sometimes in a row). Then only half of the items with the most crashes run, so finding one of n takes log2(n)
further crashes, and all others complete. The state is the number of crashes of each item: restoring those numbers
resumes the search after a restart.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

DEATHS_TO_BE_SUSPECTED = 4


class CrashBisector(Generic[T]):
    """Numbers of crashes by item, and the items on trial."""

    def __init__(self) -> None:
        self.deaths: dict[T, int] = {}
        """Crashes at which each item was running; items without any are absent."""
        self._trial: set[T] = set()

    def restore(self, deaths: Mapping[T, int]) -> None:
        """Restore the numbers of crashes."""
        self.deaths |= {item: number for item, number in deaths.items() if number}
        self._start_next_trial()

    def may_run(self, item: T) -> bool:
        """Return False while only the items on trial may run."""
        return not self._trial or item in self._trial

    def record_crash(self, running: Iterable[T]) -> T | None:
        """Count a crash while these items were running. Returns: the culprit, if it is identified."""
        present = [item for item in running if self.may_run(item)]
        culprit_request = present[0] if len(self._trial) == 1 and present else None
        if culprit_request is not None:
            del self.deaths[culprit_request]
            self.deaths = dict.fromkeys(self.deaths, DEATHS_TO_BE_SUSPECTED - 1)  # their crashes were the culprit's
        else:
            self.deaths |= {item: self.deaths.get(item, 0) + 1 for item in present}
        self._start_next_trial()
        return culprit_request

    def finished(self, item: T) -> bool:
        """Remove an item that ended, in success or failure. Returns: True if further items may run now."""
        self.deaths.pop(item, None)
        if item not in self._trial:
            return False
        self._trial.remove(item)
        if self._trial:
            return False
        self._start_next_trial()
        return True

    def _start_next_trial(self) -> None:
        most = max(self.deaths.values(), default=0)
        suspects = [item for item, number in self.deaths.items() if number == most >= DEATHS_TO_BE_SUSPECTED]
        self._trial = set(suspects[: (len(suspects) + 1) // 2])
