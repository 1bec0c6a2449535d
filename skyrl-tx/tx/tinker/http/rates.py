"""How fast numbers grow that only grow: from one look at the status page to the next."""

import time
from collections.abc import Mapping


class Rates:
    """
    Args:
        shortest: seconds between two looks; a sooner one sees the rates of the one before
    """

    def __init__(self, shortest: float = 1.0):
        self.shortest = shortest
        self._totals: dict[str, float] = {}
        self._at: float | None = None
        self._rates: dict[str, float] = {}

    def look(self, totals: Mapping[str, float], now: float | None = None) -> dict[str, float]:
        """Each number's growth a second since the last look; empty at the first. One that fell began anew from zero."""
        now = time.monotonic() if now is None else now
        if self._at is not None and now - self._at < self.shortest:
            return self._rates
        if self._at is not None:
            seconds = now - self._at
            before = {name: self._totals.get(name, 0.0) for name in totals}
            self._rates = {
                name: (total - before[name] if total >= before[name] else total) / seconds
                for name, total in totals.items()
            }
        self._totals, self._at = dict(totals), now
        return self._rates
