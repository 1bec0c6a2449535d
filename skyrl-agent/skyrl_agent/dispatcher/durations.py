"""Expected durations of an instance's trajectories, from those that have ended. Independent of limits and queues."""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from statistics import correlation

from skyrl_agent.dispatcher.plan import STAGES
from skyrl_agent.types import Stage

WEIGHT_OF_LAST = 0.3
"""Weight of the newest trajectory in the mean of its instance: policies change from epoch to epoch."""
MIN_PAIRS, MAX_PAIRS = 16, 256
MIN_SURPRISE, SURPRISED = 3.0, 0.98
"""Siblings do not predict the long tail where one trajectory in fifty exceeds its expectation by this factor."""
MIN_CORRELATION = 0.2
MAX_INSTANCES = 1 << 17
"""Instances remembered, the last ones: without `data.instance_id_key` each batch has new ones."""


class Durations:
    """Exponential means of the seconds of each stage by instance, and a measure of how well they predict the next
    trajectory."""

    def __init__(self) -> None:
        self._means: dict[Hashable, tuple[float, ...]] = {}
        self._pairs: deque[tuple[float, float]] = deque(maxlen=MAX_PAIRS)
        self._correlation = 0.0

    @property
    def predictive(self) -> bool:
        """Logarithms of expected and of actual seconds of the last trajectories correlate by `MIN_CORRELATION`.
        Otherwise an order by expectation is an arbitrary one, or (where long ones become short) the opposite one."""
        return self._correlation >= MIN_CORRELATION

    def add(self, instance: Hashable, seconds: Sequence[float]) -> None:
        """Record a trajectory that ended without failure.

        Args:
            seconds: of each stage, without waits; where it is known, those that the stage would take alone.
        """
        known = self._means.pop(instance, None)
        if len(self._means) == MAX_INSTANCES:
            del self._means[next(iter(self._means))]
        if known is None:
            self._means[instance] = tuple(seconds)
            return
        self._pairs.append((math.log1p(sum(known)), math.log1p(sum(seconds))))
        self._means[instance] = tuple(
            (1 - WEIGHT_OF_LAST) * mean + WEIGHT_OF_LAST * last for mean, last in zip(known, seconds, strict=True)
        )
        if len(self._pairs) >= MIN_PAIRS:
            self._correlation = _compute_correlation(self._pairs)

    def longest(self, instances: Sequence[Hashable]) -> float:
        """Return the seconds by which some trajectory of these is likely to exceed its expected duration: at most the
        longest recent excess. 0 if siblings predict the long ones, or without data.
        """
        known = [sum(self._means[instance]) for instance in instances if instance in self._means]
        if not known or len(self._pairs) < MIN_PAIRS:
            return 0.0
        surprises = sorted(actual - expected for expected, actual in self._pairs)
        if math.exp(_compute_quantile(surprises, SURPRISED)) < MIN_SURPRISE:
            return 0.0
        ever = max(math.expm1(actual) for _, actual in self._pairs)
        return min(ever, max(known) * math.exp(_compute_quantile(surprises, 1 - 1 / len(instances))))

    def stage(self, instance: Hashable, stage: Stage) -> float | None:
        """Return the expected seconds of a stage; None for an unknown instance."""
        known = self._means.get(instance)
        return None if known is None else known[STAGES.index(stage)]

    def estimate_remaining(self, instance: Hashable, stage: Stage) -> float:
        """Return the expected seconds from the start of a stage to the end, without waits. Infinite for an instance
        without finished trajectories: it is new, or its first trajectories are long.
        """
        known = self._means.get(instance)
        return math.inf if known is None else sum(known[STAGES.index(stage) :])


def _compute_quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def _compute_correlation(pairs: deque[tuple[float, float]]) -> float:
    expected, actual = zip(*pairs, strict=True)
    if len(set(expected)) == 1 or len(set(actual)) == 1:
        return 0.0
    return correlation(expected, actual)
