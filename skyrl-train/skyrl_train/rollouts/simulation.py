"""Simulation of asynchronous training in virtual time, on the scheduler that a run uses.

Model of an engine: all sequences that it decodes gain one token in each of its iterations, and an iteration with c
sequences takes `seconds_per_iteration + c * seconds_per_sequence`. Prefill is part of these figures. An environment's
time occupies no engine. During a weight sync engines stand still and keep their sequences.
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits


@dataclass(frozen=True)
class SampleCost:
    """Cost of one sample: tokens to generate, and seconds outside of engines (environment, tools, judge)."""

    num_tokens: int
    wait_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations of a run's parts, in seconds."""

    num_engines: int
    seconds_per_iteration: float
    """Of one decoding iteration of an engine, however many sequences it has."""

    seconds_per_sequence: float = 0.0
    """Added to an iteration by each sequence."""

    max_sequences: int = 1024
    """Sequences that an engine decodes at once; further ones wait."""

    step_seconds: float
    """Of a training step, from the groups to new weights."""

    sync_seconds: float = 0.0
    """For which engines stand still at each weight sync."""


@dataclass
class SimulatedRun:
    """Figures of a simulated run. Utilisation: share of the time in which trainer or engines computed (an engine counts
    by its busy time, however few sequences it has)."""

    step_ends: list[float] = field(default_factory=list)
    """Seconds from the start to the end of each training step, its weight sync included."""

    num_samples: list[int] = field(default_factory=list)
    """Samples that each step trained on."""

    trainer_utilisation: float = 0.0
    engine_utilisation: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    """Number of trained groups by age in steps."""

    num_restarted: int = 0

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def samples_per_second(self) -> float:
        """Throughput of the later two thirds of the steps: the first ones start with no group under way."""
        first = len(self.step_ends) // 3
        seconds = self.seconds - (self.step_ends[first - 1] if first else 0.0)
        return sum(self.num_samples[first:]) / seconds


class _Engine:
    """Engine in virtual time. Its sequences advance together, so each ends at a fixed value of a counter of tokens."""

    def __init__(self, costs: Costs):
        self._costs = costs
        self._now = self._counter = 0.0
        self._ends: list[tuple[float, int]] = []  # (counter at the last token, sequence)
        self._queue: deque[tuple[int, int]] = deque()
        self.busy_seconds = 0.0
        self.is_paused = False

    @property
    def load(self) -> int:
        return len(self._ends) + len(self._queue)

    def add(self, sequence: int, num_tokens: int) -> None:
        self._queue.append((sequence, num_tokens))
        self._admit()

    def abort(self, sequence: int) -> None:
        """Drop a sequence, which may be decoding, queued or neither any more."""
        self._ends = [end for end in self._ends if end[1] != sequence]
        heapq.heapify(self._ends)
        self._queue = deque(entry for entry in self._queue if entry[0] != sequence)
        self._admit()

    def advance(self, now: float) -> None:
        if self._ends and not self.is_paused:
            self._counter += (now - self._now) / self._seconds_per_token()
            self.busy_seconds += now - self._now
        self._now = now

    def next_end(self) -> float:
        if not self._ends or self.is_paused:
            return float("inf")
        return self._now + max(0.0, self._ends[0][0] - self._counter) * self._seconds_per_token()

    def pop_end(self) -> int:
        counter, sequence = heapq.heappop(self._ends)
        self._counter = max(self._counter, counter)
        self._admit()
        return sequence

    def _seconds_per_token(self) -> float:
        return self._costs.seconds_per_iteration + len(self._ends) * self._costs.seconds_per_sequence

    def _admit(self) -> None:
        while self._queue and len(self._ends) < self._costs.max_sequences:
            sequence, num_tokens = self._queue.popleft()
            heapq.heappush(self._ends, (self._counter + num_tokens, sequence))


class Simulation:
    """A run in virtual time.

    Args:
        limits: of the schedule; synchronous training is `max_staleness_steps=0`, `order=exact`.
        groups: samples of each group; group i of the run is one of these, drawn with `seed`.
        sync_every_steps: training steps between weight syncs.
        in_order: group i of the run is number i of `groups`, and after the last of them the first again.
    """

    def __init__(
        self,
        limits: ScheduleLimits,
        groups: Sequence[Sequence[SampleCost]],
        costs: Costs,
        seed: int = 0,
        sync_every_steps: int = 1,
        in_order: bool = False,
    ):
        self._limits, self._groups, self._costs, self._seed = limits, groups, costs, seed
        self._sync_every_steps, self._in_order = sync_every_steps, in_order
        self._scheduler = GroupScheduler(limits)
        self._engines = [_Engine(costs) for _ in range(costs.num_engines)]
        self._waits: list[tuple[float, int]] = []  # (end, sequence)
        self._open: dict[int, set[int]] = {}  # sequences of a running group
        self._places: dict[int, tuple[int, _Engine, SampleCost]] = {}  # sequence: group, engine, cost
        self._numbers = itertools.count()
        self._now = 0.0
        self.run = SimulatedRun()

    def simulate(self, num_steps: int | None = None) -> SimulatedRun:
        """Simulate the first `num_steps` steps (None: all, to an end at which engines idle). Returns: their figures."""
        num_steps = num_steps or self._limits.total_steps
        step_end, sync_end, trainer_seconds = float("inf"), float("inf"), 0.0
        batch: list[int] | None = None
        while len(self.run.step_ends) < num_steps:
            self._restart_stale()
            while sync_end == float("inf") and self._scheduler.may_start():
                self._start(self._scheduler.start())
            if batch is None and sync_end == float("inf"):
                batch = self._scheduler.next_batch()
                if batch is not None:
                    self.run.ages.update(self._scheduler.age(ticket) for ticket in batch)
                    self.run.num_samples.append(sum(len(self._samples(ticket)) for ticket in batch))
                    step_end = self._now + self._costs.step_seconds
                    trainer_seconds += self._costs.step_seconds
            first = min(self._engines, key=_Engine.next_end)
            wait_end = self._waits[0][0] if self._waits else float("inf")
            self._advance(min(first.next_end(), wait_end, step_end, sync_end))
            if self._now >= sync_end:
                sync_end = float("inf")
                self.run.step_ends.append(self._now)
                self._pause(False)
                self._scheduler.synced(self._scheduler.num_trained_steps)
            elif self._now >= step_end:
                assert batch is not None
                self._scheduler.trained(batch)
                batch, step_end = None, float("inf")
                if self._scheduler.num_trained_steps % self._sync_every_steps:
                    self.run.step_ends.append(self._now)
                    continue
                sync_end = self._now + self._costs.sync_seconds
                self._pause(True)
            elif self._now >= wait_end:
                self._end(heapq.heappop(self._waits)[1])
            else:
                self._end_of_tokens(first.pop_end())
        self.run.trainer_utilisation = trainer_seconds / self._now
        self.run.engine_utilisation = sum(engine.busy_seconds for engine in self._engines) / (
            self._now * len(self._engines)
        )
        return self.run

    def _samples(self, ticket: int) -> Sequence[SampleCost]:
        if self._in_order:
            return self._groups[ticket % len(self._groups)]
        return self._groups[random.Random(f"{self._seed} {ticket}").randrange(len(self._groups))]

    def _advance(self, now: float) -> None:
        assert now < float("inf"), f"{self._scheduler.why_not_started()}; {self._scheduler.why_no_batch()}"
        self._now = now
        for engine in self._engines:
            engine.advance(now)

    def _pause(self, is_paused: bool) -> None:
        for engine in self._engines:
            engine.is_paused = is_paused

    def _start(self, ticket: int) -> None:
        self._open[ticket] = set()
        for cost in self._samples(ticket):
            sequence, engine = next(self._numbers), min(self._engines, key=lambda engine: engine.load)
            self._open[ticket].add(sequence)
            self._places[sequence] = (ticket, engine, cost)
            engine.add(sequence, cost.num_tokens)

    def _restart_stale(self) -> None:
        for ticket in self._scheduler.take_stale():
            self.run.num_restarted += 1
            for sequence in self._open.pop(ticket, set()):
                self._places.pop(sequence)[1].abort(sequence)

    def _end_of_tokens(self, sequence: int) -> None:
        wait = self._places[sequence][2].wait_seconds
        if wait:
            heapq.heappush(self._waits, (self._now + wait, sequence))
        else:
            self._end(sequence)

    def _end(self, sequence: int) -> None:
        if sequence not in self._places:  # its group was restarted while it waited
            return
        ticket = self._places.pop(sequence)[0]
        self._open[ticket].discard(sequence)
        if not self._open[ticket]:
            del self._open[ticket]
            self._scheduler.finished(ticket)
