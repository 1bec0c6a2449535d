"""Simulation of asynchronous training in virtual time, on the scheduler that a run uses.

Model of an engine: all sequences that it decodes gain one token in each of its iterations, and an iteration with c
sequences takes `seconds_per_iteration + c * seconds_per_sequence`. Prefill is part of these figures. An environment's
time occupies no engine. During a weight sync engines stand still and keep their sequences. An engine is brought up to
the present time only when something happens to it.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter

from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits


@dataclass(frozen=True)
class SampleCost:
    """Cost of one sample: tokens to generate, and then seconds outside of engines (environment, tools, judge)."""

    num_tokens: int
    """0: the seconds are those of its tokens as well."""

    wait_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Durations of a run's parts, in seconds."""

    num_engines: int
    seconds_per_iteration: float
    """Duration of one decoding iteration of an engine, apart from `seconds_per_sequence`."""

    seconds_per_sequence: float = 0.0
    """Additional duration of an iteration per sequence."""

    max_sequences: int = 1024
    """Sequences that an engine decodes at once; further ones wait."""

    step_seconds: float
    """Duration of a training step, from the groups to new weights."""

    sync_seconds: float = 0.0
    """Time for which engines stand still at each weight sync."""


@dataclass
class SimulatedRun:
    """Figures of a simulated run. Utilisation: share of the time in which trainer or engines computed (an engine counts
    by its busy time, however few sequences it has)."""

    step_ends: list[float] = field(default_factory=list)
    """Seconds from the start to the end of each training step, its weight sync included."""

    num_samples: list[int] = field(default_factory=list)
    """Samples that each step trained on: those of groups within the bound on staleness."""

    trainer_utilisation: float = 0.0
    engine_utilisation: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    """Number of groups that steps took, by age in steps. Those above the bound are masked (`on_stale=mask`)."""

    num_masked: int = 0
    """Groups that steps took and masked."""

    num_restarted: int = 0
    """Groups whose generation was thrown away, as they had become too old."""

    trainer_wait_seconds: float = 0.0
    """Mean over steps of the time for which the trainer waited for groups."""

    queue_seconds: float = 0.0
    """Mean over groups of the time between the end of their generation and the start of their step."""

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def samples_per_second(self) -> float:
        """Throughput of the later two thirds of the steps: the first ones start with no group under way."""
        first = len(self.step_ends) // 3
        seconds = self.seconds - (self.step_ends[first - 1] if first else 0.0)
        return sum(self.num_samples[first:]) / seconds

    @property
    def masked_share(self) -> float:
        """Share of the groups taken by steps that were too old to be trained."""
        return self.num_masked / max(1, self.ages.total())

    @property
    def restarted_share(self) -> float:
        """Share of the generated groups that were thrown away and generated anew."""
        return self.num_restarted / max(1, self.ages.total() + self.num_restarted)


class _Place:
    """Places of a sequence."""

    QUEUED = 0
    DECODING = 1
    ENVIRONMENT = 2
    GONE = 3


class _Group:
    """Group that is being generated."""

    __slots__ = ("newest_version", "num_open", "sequences", "ticket")

    def __init__(self, ticket: int, version: int):
        self.ticket, self.sequences, self.num_open, self.newest_version = ticket, list[_Sequence](), 0, version


class _Sequence:
    """Sample of such a group."""

    __slots__ = ("cost", "engine", "group", "place")

    def __init__(self, group: _Group, cost: SampleCost, engine: "_Engine"):
        self.group, self.cost, self.engine, self.place = group, cost, engine, _Place.QUEUED


class _Engine:
    """Engine in virtual time. Its sequences advance together, so each ends at a fixed value of a counter of tokens.

    Its methods are called at non-decreasing times; between calls it needs no attention until `next_end`. An aborted
    sequence is marked and skipped later: taking it out of a heap would cost as much as the heap is long.
    """

    def __init__(self, costs: Costs, number: int):
        self._costs, self.number = costs, number
        self._now = self._counter = 0.0
        self._ends: list[tuple[float, int, _Sequence]] = []  # (counter at the last token, tie-breaker, sequence)
        self._queue: deque[_Sequence] = deque()
        self._num_decoding = self._num_added = 0
        self.load = 0
        """Sequences that are decoded or queued."""
        self.busy_seconds = 0.0
        self.is_paused = False
        self.changes = 0
        """Number of changes: an end that was computed before the last one is void."""

    def add(self, sequence: _Sequence, now: float) -> None:
        self._advance(now)
        self._queue.append(sequence)
        self.load += 1
        self._admit()

    def abort(self, sequence: _Sequence, now: float) -> None:
        """Drop a sequence, wherever it is."""
        self._advance(now)
        self._num_decoding -= sequence.place == _Place.DECODING
        self.load -= sequence.place in (_Place.QUEUED, _Place.DECODING)
        sequence.place = _Place.GONE
        self._admit()

    def pause(self, is_paused: bool, now: float) -> None:
        self._advance(now)
        self.is_paused = is_paused

    def next_end(self) -> float | None:
        """Return when the next sequence has its last token; None: never, as things are."""
        while self._ends and self._ends[0][2].place == _Place.GONE:
            heapq.heappop(self._ends)
        if not self._ends or self.is_paused:
            return None
        num_tokens = self._ends[0][0] - self._counter
        return self._now + num_tokens * self._seconds_per_token() if num_tokens > 0 else self._now

    def pop_end(self, now: float) -> _Sequence:
        """Take out the sequence that `next_end` meant, at the time that it returned."""
        self.busy_seconds += now - self._now
        self._now = now
        self._counter, _, sequence = heapq.heappop(self._ends)
        sequence.place = _Place.ENVIRONMENT
        self._num_decoding -= 1
        self.load -= 1
        self._admit()
        return sequence

    def _advance(self, now: float) -> None:
        if now > self._now and self._num_decoding and not self.is_paused:
            self._counter += (now - self._now) / self._seconds_per_token()
            self.busy_seconds += now - self._now
        self._now = now

    def _seconds_per_token(self) -> float:
        return self._costs.seconds_per_iteration + self._num_decoding * self._costs.seconds_per_sequence

    def _admit(self) -> None:
        while self._queue and self._num_decoding < self._costs.max_sequences:
            sequence = self._queue.popleft()
            if sequence.place == _Place.GONE:
                continue
            sequence.place = _Place.DECODING
            self._num_decoding += 1
            self._num_added += 1
            heapq.heappush(self._ends, (self._counter + sequence.cost.num_tokens, self._num_added, sequence))


class _Event(IntEnum):
    """Kinds of events. Of several at one time, those of lower number come first."""

    SYNC_END = 0
    STEP_END = 1
    ENVIRONMENT_END = 2
    TOKENS_END = 3


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
        self._limits, self._groups, self._costs = limits, groups, costs
        self._sync_every_steps, self._in_order = sync_every_steps, in_order
        self._scheduler = GroupScheduler(limits)
        self._engines = [_Engine(costs, number) for number in range(costs.num_engines)]
        self._touched: set[_Engine] = set()  # engines whose next end is not among the events
        self._events: list[tuple[float, int, int, int, _Engine | _Sequence | None]] = []
        """Heap of (time, kind, number of the engine or event, changes of the engine, engine or sequence)."""
        self._num_events = 0
        self._draw, self._drawn = random.Random(seed), list[int]()
        self._open: dict[int, _Group] = {}
        self._finished_at: dict[int, float] = {}
        self._oldest_version: dict[int, int] = {}
        self._now = self._trainer_free_at = self._trainer_seconds = 0.0
        self._is_syncing = False
        self._batch: list[int] | None = None
        self.run = SimulatedRun()

    def simulate(self, num_steps: int | None = None) -> SimulatedRun:
        """Simulate the first `num_steps` steps (None: all, to an end at which engines idle). Returns: their figures."""
        self._num_steps = num_steps or self._limits.total_steps
        self._start_groups()
        while len(self.run.step_ends) < self._num_steps:
            self._schedule_ends()
            assert self._events, f"{self._scheduler.why_not_started()}; {self._scheduler.why_no_batch()}"
            self._now, kind, _, changes, subject = heapq.heappop(self._events)
            if isinstance(subject, _Engine):
                if changes == subject.changes:
                    self._touched.add(subject)
                    self._end_of_tokens(subject.pop_end(self._now))
            elif isinstance(subject, _Sequence):
                self._end(subject)
            elif kind == _Event.STEP_END:
                self._end_of_step()
            else:
                self._end_of_sync()
        self._pause(True)  # brings all engines up to now
        run = self.run
        run.trainer_utilisation = self._trainer_seconds / self._now
        busy = sum(engine.busy_seconds for engine in self._engines)
        run.engine_utilisation = busy / (self._now * len(self._engines))
        run.trainer_wait_seconds /= len(run.num_samples)
        run.queue_seconds /= run.ages.total()
        return run

    def _samples(self, ticket: int) -> Sequence[SampleCost]:
        if self._in_order:
            return self._groups[ticket % len(self._groups)]
        while len(self._drawn) <= ticket:
            self._drawn.append(self._draw.randrange(len(self._groups)))
        return self._groups[self._drawn[ticket]]

    def _schedule(self, time: float, kind: _Event, sequence: _Sequence | None = None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, kind, self._num_events, 0, sequence))

    def _schedule_ends(self) -> None:
        for engine in self._touched:
            engine.changes += 1
            end = engine.next_end()
            if end is not None:
                heapq.heappush(self._events, (end, _Event.TOKENS_END, engine.number, engine.changes, engine))
        self._touched.clear()

    # ---- the trainer

    def _begin_step(self) -> None:
        """Begin a training step, if the trainer is free and the groups are there."""
        is_busy = self._batch is not None or self._is_syncing or len(self.run.num_samples) == self._num_steps
        if is_busy or (batch := self._scheduler.next_batch()) is None:
            return
        run, step = self.run, self._scheduler.num_trained_steps
        ages = [step - self._oldest_version.pop(ticket) for ticket in batch]
        is_trained = [age <= self._limits.max_staleness_steps for age in ages]
        run.ages.update(ages)
        run.num_masked += is_trained.count(False)
        pairs = zip(batch, is_trained, strict=True)
        run.num_samples.append(sum(len(self._samples(ticket)) for ticket, trained in pairs if trained))
        run.trainer_wait_seconds += self._now - self._trainer_free_at
        run.queue_seconds += sum(self._now - self._finished_at.pop(ticket) for ticket in batch)
        self._batch = batch
        self._trainer_seconds += self._costs.step_seconds
        self._schedule(self._now + self._costs.step_seconds, _Event.STEP_END)

    def _end_of_step(self) -> None:
        assert self._batch is not None
        self._scheduler.trained(self._batch)
        self._batch = None
        self._restart_stale()
        if self._scheduler.num_trained_steps % self._sync_every_steps:
            self.run.step_ends.append(self._now)
            self._trainer_free_at = self._now
            self._start_groups()
            self._begin_step()
            return
        self._is_syncing = True
        self._pause(True)
        self._schedule(self._now + self._costs.sync_seconds, _Event.SYNC_END)

    def _end_of_sync(self) -> None:
        self._is_syncing = False
        self._pause(False)
        self.run.step_ends.append(self._now)
        self._trainer_free_at = self._now
        self._scheduler.synced(self._scheduler.num_trained_steps)
        self._start_groups()
        self._begin_step()

    def _pause(self, is_paused: bool) -> None:
        for engine in self._engines:
            engine.pause(is_paused, self._now)
        self._touched.update(self._engines)

    # ---- groups

    def _start_groups(self) -> None:
        while not self._is_syncing and self._scheduler.may_start():
            ticket = self._scheduler.start()
            self._oldest_version[ticket] = version = self._scheduler.version
            self._open[ticket] = group = _Group(ticket, version)
            for cost in self._samples(ticket):
                engine = min(self._engines, key=_load)
                sequence = _Sequence(group, cost, engine)
                group.sequences.append(sequence)
                engine.add(sequence, self._now)
                self._touched.add(engine)
            group.num_open = len(group.sequences)

    def _restart_stale(self) -> None:
        for ticket in self._scheduler.take_stale():
            self.run.num_restarted += 1
            self._finished_at.pop(ticket, None)
            group = self._open.pop(ticket, None)
            for sequence in group.sequences if group else ():
                sequence.engine.abort(sequence, self._now)
                self._touched.add(sequence.engine)

    def _end_of_tokens(self, sequence: _Sequence) -> None:
        sequence.group.newest_version = self._scheduler.version
        if sequence.cost.wait_seconds:
            self._schedule(self._now + sequence.cost.wait_seconds, _Event.ENVIRONMENT_END, sequence)
        else:
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        if sequence.place == _Place.GONE:  # its group was restarted while it waited
            return
        sequence.place = _Place.GONE
        group = sequence.group
        if not sequence.cost.num_tokens:
            group.newest_version = self._scheduler.version
        group.num_open -= 1
        if group.num_open == 0:
            ticket = group.ticket
            del self._open[ticket]
            self._finished_at[ticket] = self._now
            self._scheduler.finished(ticket, group.newest_version if self._limits.on_stale == "mask" else None)
            self._restart_stale()
            self._start_groups()
            self._begin_step()


_load = attrgetter("load")
