"""Automatic limits of stages, from measured stage times. Independent of trajectories and queues."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

GROWTH = 2
WINDOW = 512
"""Number of the last trajectories that an estimate is made from."""
INTERVAL = 32
"""Number of trajectories between two estimates."""
MIN_EVIDENCE, MUCH_EVIDENCE = 4.0, 12.0
"""Least logarithm of the likelihood ratio for which a model replaces the one before; a gradual one a sudden one."""
SHARE_PRESSED = 0.5
CAPACITIES = tuple(round(2 ** (exponent / 2)) for exponent in range(4, 23))  # 4, 6, 8, ... 2048
PROBE_AFTER, PROBE_INTERVALS = 16, 2
"""Number of estimates after which a limit is doubled for some, to see whether it still holds."""


@dataclass(frozen=True)
class SpeedModel:
    """Speed of each of n concurrent trajectories in a stage, relative to a single one.

    Args:
        limit: number of trajectories at which throughput saturates; None: it never does.
    """

    speed: Callable[[int], float]
    limit: int | None


def _build_sharing_model(capacity: int) -> SpeedModel:
    """Model trajectories that share a fixed capacity."""
    return SpeedModel(lambda n: min(1.0, capacity / n), capacity)


def _build_saturating_model(capacity: int) -> SpeedModel:
    """Model throughput that approaches a capacity gradually; three times as many reach 95 % of it."""
    return SpeedModel(lambda n: capacity * (1 - math.exp(-n / capacity)) / n, 3 * capacity)


MODELS = (
    SpeedModel(lambda n: 1.0, None),
    *map(_build_sharing_model, CAPACITIES),
    *map(_build_saturating_model, CAPACITIES),
)
"""From the simplest on: a later one is believed where there is evidence against the earlier ones."""
SIMPLER = range(len(CAPACITIES) + 1)


@dataclass(frozen=True)
class StageEntry:
    """Entry of a trajectory into a stage: seconds of work done until then, by each model."""

    clocks: tuple[float, ...]


class StageSize:
    """Adaptive limit of one stage. Durations of an instance's trajectories differ by chance and by how many
    trajectories run concurrently. The limit is the saturation point of the speed model under which their work differs
    least. Without evidence of saturation, the limit doubles whenever it makes trajectories wait.

    Args:
        limit: the initial limit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._inside = self._peak = 0
        self._now = 0.0
        self._clocks = [0.0] * len(MODELS)
        self._ended: deque[tuple[Hashable, list[float]]] = deque(maxlen=WINDOW)
        """Instance, and logarithm of the work by model."""
        self._model = 0
        """Index of the model that holds until there is evidence for another."""
        self._since_probe = 0
        self._entered: deque[bool] = deque(maxlen=INTERVAL)
        self._unseen = 0

    def started(self, now: float, pressed: bool) -> StageEntry:
        """Record a trajectory that enters the stage.

        Args:
            now: seconds.
            pressed: it had to wait for this stage, and the next stage has a free slot.

        Returns:
            for `ended`.
        """
        self._update_work(now)
        self._inside += 1
        self._peak = max(self._peak, self._inside)
        self._entered.append(pressed)
        return StageEntry(tuple(self._clocks))

    def ended(self, now: float, entry: StageEntry, instance: Hashable | None) -> bool:
        """Record a trajectory that leaves the stage.

        Args:
            instance: trajectories of one instance are compared; None: it failed, and is not.

        Returns:
            the limit has changed.
        """
        self._update_work(now)
        self._inside -= 1
        work = [end - begin for begin, end in zip(entry.clocks, self._clocks, strict=True)]
        if instance is None or min(work) <= 0:  # very short times are below the resolution of a large clock value
            return False
        self._ended.append((instance, list(map(math.log, work))))
        self._unseen += 1
        if self._unseen < INTERVAL:
            return False
        self._unseen, before = 0, self.limit
        self.limit = self._estimate()
        return self.limit != before

    def work(self, entry: StageEntry) -> float:
        """Return the seconds that a just finished trajectory would have taken alone, by the current model."""
        return self._clocks[self._model] - entry.clocks[self._model]

    def _update_work(self, now: float) -> None:
        seconds, self._now = now - self._now, now
        if self._inside and seconds:
            for index, model in enumerate(MODELS):
                self._clocks[index] += seconds * model.speed(self._inside)

    def _estimate(self) -> int:
        deviations, freedom = _compute_deviations(self._ended)

        def is_evident(model: int, against: int, least: float = MIN_EVIDENCE) -> bool:
            return bool(deviations[model]) and (freedom * math.log(deviations[against] / deviations[model]) >= least)

        best, simple = (min(models, key=deviations.__getitem__) for models in (range(len(MODELS)), SIMPLER))
        best = best if is_evident(best, simple, MUCH_EVIDENCE) else simple
        if is_evident(best, self._model):
            self._model = best
        known = MODELS[self._model].limit
        is_pressed = self._peak >= self.limit and sum(self._entered) >= SHARE_PRESSED * INTERVAL
        self._peak = self._inside
        if known is None:
            return GROWTH * self.limit if is_pressed else self.limit
        self._since_probe = (self._since_probe + 1) % (PROBE_AFTER + PROBE_INTERVALS)
        return GROWTH * known if self._since_probe >= PROBE_AFTER and is_pressed else known


def _compute_deviations(ended: deque[tuple[Hashable, list[float]]]) -> tuple[list[float], int]:
    """Sum the absolute deviations of work from the median of its instance, by model (the likelihood of a Laplace
    distribution: stage times have long tails). Returns: and their degrees of freedom."""
    groups: defaultdict[Hashable, list[list[float]]] = defaultdict(list)
    for instance, work in ended:
        groups[instance].append(work)
    sums, freedom = [0.0] * len(MODELS), 0
    for members in groups.values():
        freedom += len(members) - 1
        for index, column in enumerate(zip(*members, strict=True)):
            middle = sorted(column)[len(column) // 2]
            sums[index] += sum(abs(value - middle) for value in column)
    return sums, freedom
