"""Metrics of a run by step, as the rules read them."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import filter as matching
from itertools import pairwise
from statistics import fmean, median

RECENT = 3
"""Latest values of a metric that a rule judges: one value may be chance."""


class History:
    """Metrics of the steps of a run, oldest first."""

    def __init__(self) -> None:
        self._curves: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        self.step = 0
        """Latest step."""

    @classmethod
    def from_curves(cls, curves: Iterable[tuple[str, Sequence[int], Sequence[float | None]]]) -> "History":
        """Build the history of a recorded run. Args: name, steps and values of each metric."""
        history = cls()
        for name, steps, values in curves:
            points = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
            history._curves[name] = points
            history.step = max([history.step, *steps])
        return history

    def append(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add the metrics of a step. Values that are no numbers are left out."""
        self.step = step
        for name, value in metrics.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._curves[name].append((step, float(value)))

    def values(self, name: str) -> list[float]:
        """Return all values of a metric."""
        return [value for _, value in self._curves.get(name, ())]

    def recent(self, name: str, number: int = RECENT) -> list[float]:
        """Return the latest values of a metric; none if it has fewer, or none in the latest step."""
        curve = self._curves.get(name, [])
        if len(curve) < number or curve[-1][0] != self.step:
            return []
        return [value for _, value in curve[-number:]]

    def earlier(self, name: str, number: int = RECENT) -> list[float]:
        """Return the values before the latest `number` ones."""
        return [value for _, value in self._curves.get(name, [])[:-number]]

    def find_onset(self, name: str, holds: Callable[[float], bool]) -> int:
        """Return the first of the steps up to the latest one in all of which a condition holds; the latest step if it
        does not hold there."""
        onset = self.step
        for step, value in reversed(self._curves.get(name, ())):
            if not holds(value):
                break
            onset = step
        return onset

    def find_names(self, pattern: str) -> list[str]:
        """Return the metrics whose names match a shell pattern."""
        return sorted(matching(self._curves, pattern))


def compute_start(values: list[float]) -> float:
    """Return the mean of the first values of a curve."""
    return fmean(values[:RECENT])


def compute_peak(values: list[float]) -> float:
    """Return the largest mean of `RECENT` consecutive values; of fewer values, their mean."""
    means = [fmean(values[i : i + RECENT]) for i in range(max(1, len(values) - RECENT + 1))]
    return max(means)


def compute_noise(values: list[float]) -> float:
    """Return the mean difference of consecutive values around their trend: of second differences, which are larger by
    the root of 3 if the noise is independent."""
    changes = [after - before for before, after in pairwise(values)]
    bends = [abs(after - before) / math.sqrt(3) for before, after in pairwise(changes)]
    return fmean(bends or [abs(change) for change in changes] or [0.0])


def compute_median(values: Iterable[float]) -> float:
    """Return the median; 0 of no values."""
    return median(found) if (found := list(values)) else 0.0
