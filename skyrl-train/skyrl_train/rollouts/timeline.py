"""Timeline of training: which slot generated which group (in synchronous training, sample) when, and the concurrent
phases of the trainer.

One record per training step, in `rollouts/timeline.jsonl` of the run folder, shown by the dashboard. Times are Unix
seconds.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from skyrl_train.types import JsonObject

Outcome = Literal["finished", "filtered", "failed", "stale"]


class Timeline:
    """Recorder of time spans. A group occupies the lowest free slot from its start to its end.

    Args:
        clock: returns the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._free: list[int] = []
        self._num_slots = 0
        self._running: dict[int, tuple[int, int, float]] = {}  # ticket: slot, weight version, start
        self._groups: list[list[object]] = []
        self._waits: list[list[object]] = []
        self._phases: list[list[object]] = []
        self._began = self._get_time()

    def _get_time(self) -> float:
        return round(self._clock(), 4)

    def group_started(self, ticket: int, version: int) -> None:
        if not self._free:
            self._free.append(self._num_slots)
            self._num_slots += 1
        self._running[ticket] = heapq.heappop(self._free), version, self._get_time()

    def group_ended(self, ticket: int, outcome: Outcome) -> None:
        slot, version, start = self._running.pop(ticket)
        heapq.heappush(self._free, slot)
        self._groups.append([ticket, slot, start, self._get_time(), version, outcome])

    def record_samples(self, spans: Iterable[tuple[str, float, float, int, Outcome]]) -> list[str]:
        """Record the samples of a synchronous step, each in the lowest slot that was free at its start.

        Args:
            spans: name, start, end, weight version and outcome of each.

        Returns:
            sample names, for `take`.
        """
        busy: list[tuple[float, int]] = []  # end, slot
        free: list[int] = []
        names = []
        for name, start, end, version, outcome in sorted(spans, key=lambda span: span[1]):
            while busy and busy[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            slot = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (end, slot))
            self._groups.append([name, slot, round(start, 4), round(end, 4), version, outcome])
            names.append(name)
        return names

    @contextmanager
    def waiting(self, reason: str) -> Iterator[None]:
        """Record that the trainer waits for groups in this block."""
        start = self._get_time()
        try:
            yield
        finally:
            self._waits.append([start, self._get_time(), reason])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase of the trainer."""
        start = self._get_time()
        try:
            yield
        finally:
            self._phases.append([name, start, self._get_time()])

    def take(self, trained: Sequence[int | str], unit: Literal["group", "sample"] = "group") -> JsonObject:
        """Return the record of a training step: everything since the last call.

        Args:
            trained: tickets of the groups, or names of the samples, trained by the step.
            unit: what occupies a slot.

        Returns:
            `began`, `ended`; `unit`; `trained`; `groups` that ended: [ticket, slot, start, end, weight version at the
            start, outcome]; `running` groups: [ticket, slot, start, weight version]; `waits`: [start, end, reason];
            `phases`: [name, start, end].
        """
        now = self._get_time()
        record: JsonObject = {
            "began": self._began,
            "ended": now,
            "unit": unit,
            "trained": list(trained),
            "groups": self._groups,
            "running": [[ticket, slot, start, version] for ticket, (slot, version, start) in self._running.items()],
            "waits": self._waits,
            "phases": self._phases,
        }
        self._groups, self._waits, self._phases, self._began = [], [], [], now
        return record
