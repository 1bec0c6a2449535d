"""Discrete-event simulation of asynchronous training on the scheduler that a run uses.

Model of an engine: all sequences that it decodes gain one token in each of its iterations, and an iteration with c
sequences takes `seconds_per_iteration + c * seconds_per_sequence`. Prefill is part of these figures. The time of an
environment occupies no engine. During a weight sync engines pause and keep their sequences. Only groups within the
bound on staleness count as throughput.
"""

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Literal

from skyrl_train.rollouts.schedule import GroupScheduler, ScheduleLimits


@dataclass(frozen=True)
class SampleCost:
    """Cost of one sample: tokens to generate, and then seconds outside of engines (environment, tools, judge)."""

    num_tokens: int
    """0: `wait_seconds` includes the time of its tokens."""

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
    """Time for which engines pause at each weight sync."""

    repeatability: float = 1.0
    """Probability that a regenerated group takes as long as before; otherwise it takes as long as another
    group. In a measured run: the fraction of the variance of samples' durations between prompts."""


@dataclass
class SimulatedRun:
    """Figures of a simulated run. Utilisation: share of the time in which trainer or engines computed (an engine counts
    by its busy time, however few sequences it has)."""

    step_ends: list[float] = field(default_factory=list)
    """Seconds from the start to the end of each training step, its weight sync included."""

    num_samples: list[int] = field(default_factory=list)
    """Samples that each step trained on: samples of groups within the bound on staleness."""

    trainer_utilisation: float = 0.0
    engine_utilisation: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)
    """Number of groups that steps took, by age in steps. Groups above the bound are masked (`on_stale=mask`)."""

    num_masked: int = 0
    """Groups that steps took and masked."""

    num_restarted: int = 0
    """Groups that became too old and were generated again."""

    trainer_wait_seconds: float = 0.0
    """Mean over steps of the time for which the trainer waited for groups."""

    queue_seconds: float = 0.0
    """Mean over groups of the time between the end of their generation and the start of their step."""

    @property
    def seconds(self) -> float:
        return self.step_ends[-1]

    @property
    def samples_per_second(self) -> float:
        """Throughput of the later two thirds of the steps: the first ones start without a group in flight."""
        first = len(self.step_ends) // 3
        return sum(self.num_samples[first:]) / (self.seconds - (self.step_ends[first - 1] if first else 0.0))

    @property
    def masked_share(self) -> float:
        """Share of the groups taken by steps that were too old to be trained."""
        return self.num_masked / max(1, self.ages.total())

    @property
    def restarted_share(self) -> float:
        """Share of the generated groups that were generated again."""
        return self.num_restarted / max(1, self.ages.total() + self.num_restarted)


# ---- simulator


@dataclass(eq=False, slots=True)
class _Sequence:
    """Sample of a group in flight."""

    group: "_Group"
    cost: SampleCost
    engine: "_Engine"
    state: Literal["queued", "decoding", "waiting", "done"] = "queued"


@dataclass(eq=False, slots=True)
class _Group:
    """Group that is being generated."""

    ticket: int
    newest_version: int
    sequences: list[_Sequence] = field(default_factory=list)
    num_open: int = 0


class _Engine:
    """Engine in virtual time. Its sequences advance together, so each ends at a fixed value of a token counter.

    Its methods are called at non-decreasing times. An aborted sequence is marked and skipped later: to remove it from a
    heap would cost as much as the heap is long.
    """

    def __init__(self, costs: Costs):
        self._costs = costs
        self._now = self._counter = self.busy_seconds = 0.0
        self._heap: list[tuple[float, int, _Sequence]] = []  # (counter at the last token, tie-breaker, sequence)
        self._queue: deque[_Sequence] = deque()
        self._num_decoding = self._num_admitted = self.load = 0
        self._is_paused = False
        self.end = math.inf
        """When the next sequence has its last token, unless the engine changes before."""

    def add(self, sequence: _Sequence, now: float) -> None:
        self._advance(now)
        self._queue.append(sequence)
        self.load += 1
        self._update()

    def abort(self, sequence: _Sequence, now: float) -> None:
        self._advance(now)
        self._num_decoding -= sequence.state == "decoding"
        self.load -= sequence.state in ("queued", "decoding")
        sequence.state = "done"
        self._update()

    def pause(self, is_paused: bool, now: float) -> None:
        self._advance(now)
        self._is_paused = is_paused
        self._update()

    def pop(self) -> _Sequence:
        """Take out the sequence that has its last token at `end`."""
        self.busy_seconds += self.end - self._now
        self._now = self.end
        self._counter, _, sequence = heapq.heappop(self._heap)
        sequence.state = "waiting"
        self._num_decoding -= 1
        self.load -= 1
        self._update()
        return sequence

    def _advance(self, now: float) -> None:
        if now > self._now and self._num_decoding and not self._is_paused:
            self._counter += (now - self._now) / self._compute_seconds_per_token()
            self.busy_seconds += now - self._now
        self._now = now

    def _compute_seconds_per_token(self) -> float:
        return self._costs.seconds_per_iteration + self._num_decoding * self._costs.seconds_per_sequence

    def _update(self) -> None:
        """Admit queued sequences, and compute the next end."""
        while self._queue and self._num_decoding < self._costs.max_sequences:
            sequence = self._queue.popleft()
            if sequence.state == "done":
                continue
            sequence.state = "decoding"
            self._num_decoding += 1
            self._num_admitted += 1
            heapq.heappush(self._heap, (self._counter + sequence.cost.num_tokens, self._num_admitted, sequence))
        while self._heap and self._heap[0][2].state == "done":
            heapq.heappop(self._heap)
        self.end = math.inf
        if self._heap and not self._is_paused:
            self.end = self._now + max(0.0, self._heap[0][0] - self._counter) * self._compute_seconds_per_token()


_SYNC_END, _STEP_END, _ENVIRONMENT_END = range(3)
"""Kinds of timers. At equal times lower ones run first, and all of them before the ends of tokens."""


class Simulation:
    """A run in virtual time.

    Args:
        limits: of the schedule; synchronous training is `max_staleness_steps=0`, `order=exact`.
        groups: samples of each group; group i of the run is one of these, drawn with `seed`.
        sync_every_steps: training steps between weight syncs.
        in_order: group i of the run is number i of `groups`, modulo their number.
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
        self._engines = [_Engine(costs) for _ in range(costs.num_engines)]
        self._timers: list[tuple[float, int, int, Callable[[], None]]] = []  # (time, kind, tie-breaker, function)
        self._num_timers = 0
        self._random, self._drawn = random.Random(seed), list[int]()
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
            engine = min(self._engines, key=attrgetter("end"))
            if self._timers and self._timers[0][0] <= engine.end:
                self._now, _, _, function = heapq.heappop(self._timers)
                function()
            else:
                self._now = engine.end
                assert self._now < math.inf, (
                    f"{self._scheduler.describe_why_not_started()}; {self._scheduler.describe_why_no_batch()}"
                )
                self._complete_tokens(engine.pop())
        self._pause(True)  # brings all engines up to now
        run = self.run
        run.trainer_utilisation = self._trainer_seconds / self._now
        busy = sum(engine.busy_seconds for engine in self._engines)
        run.engine_utilisation = busy / (self._now * len(self._engines))
        run.trainer_wait_seconds /= len(run.num_samples)
        run.queue_seconds /= run.ages.total()
        return run

    def _draw_samples(self, ticket: int) -> Sequence[SampleCost]:
        while len(self._drawn) <= ticket:
            self._drawn.append(len(self._drawn) % len(self._groups) if self._in_order else self._draw_group())
        return self._groups[self._drawn[ticket]]

    def _draw_group(self) -> int:
        return self._random.randrange(len(self._groups))

    def _call_later(self, seconds: float, kind: int, function: Callable[[], None]) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (self._now + seconds, kind, self._num_timers, function))

    def _start_step(self) -> None:
        """Begin a training step, if the trainer is free and the groups are finished."""
        is_busy = self._batch is not None or self._is_syncing or len(self.run.num_samples) == self._num_steps
        if is_busy or (batch := self._scheduler.get_next_batch()) is None:
            return
        run, step = self.run, self._scheduler.num_trained_steps
        ages = {ticket: step - self._oldest_version.pop(ticket) for ticket in batch}
        trained = [ticket for ticket in batch if ages[ticket] <= self._limits.max_staleness_steps]
        run.ages.update(ages.values())
        run.num_masked += len(batch) - len(trained)
        run.num_samples.append(sum(len(self._draw_samples(ticket)) for ticket in trained))
        run.trainer_wait_seconds += self._now - self._trainer_free_at
        run.queue_seconds += sum(self._now - self._finished_at.pop(ticket) for ticket in batch)
        self._batch = batch
        self._trainer_seconds += self._costs.step_seconds
        self._call_later(self._costs.step_seconds, _STEP_END, self._complete_step)

    def _complete_step(self) -> None:
        assert self._batch is not None
        self._scheduler.record_trained(self._batch)
        self._batch = None
        self._restart_stale()
        if self._scheduler.num_trained_steps % self._sync_every_steps:
            self._finish_step()
            return
        self._is_syncing = True
        self._pause(True)
        self._call_later(self._costs.sync_seconds, _SYNC_END, self._complete_sync)

    def _complete_sync(self) -> None:
        self._is_syncing = False
        self._pause(False)
        self._scheduler.record_synced(self._scheduler.num_trained_steps)
        self._finish_step()

    def _finish_step(self) -> None:
        """Record the end of a step, and start what it allows."""
        self.run.step_ends.append(self._now)
        self._trainer_free_at = self._now
        self._start_groups()
        self._start_step()

    def _pause(self, is_paused: bool) -> None:
        for engine in self._engines:
            engine.pause(is_paused, self._now)

    def _start_groups(self) -> None:
        while not self._is_syncing and self._scheduler.can_start():
            ticket = self._scheduler.start()
            self._oldest_version[ticket] = version = self._scheduler.version
            self._open[ticket] = group = _Group(ticket, version)
            for cost in self._draw_samples(ticket):
                engine = min(self._engines, key=attrgetter("load"))
                group.sequences.append(_Sequence(group, cost, engine))
                engine.add(group.sequences[-1], self._now)
            group.num_open = len(group.sequences)

    def _restart_stale(self) -> None:
        for ticket in self._scheduler.requeue_stale():
            self.run.num_restarted += 1
            if self._random.random() >= self._costs.repeatability:
                self._drawn[ticket] = self._draw_group()
            self._finished_at.pop(ticket, None)
            group = self._open.pop(ticket, None)
            for sequence in group.sequences if group else ():
                sequence.engine.abort(sequence, self._now)

    def _complete_tokens(self, sequence: _Sequence) -> None:
        sequence.group.newest_version = self._scheduler.version
        if sequence.cost.wait_seconds:
            self._call_later(sequence.cost.wait_seconds, _ENVIRONMENT_END, partial(self._end, sequence))
        else:
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        if sequence.state == "done":  # its group was restarted while it waited
            return
        sequence.state, group = "done", sequence.group
        if not sequence.cost.num_tokens:
            group.newest_version = self._scheduler.version
        group.num_open -= 1
        if group.num_open == 0:
            del self._open[group.ticket]
            self._finished_at[group.ticket] = self._now
            newest = group.newest_version if self._limits.on_stale == "mask" else None
            self._scheduler.record_finished(group.ticket, newest)
            self._restart_stale()
            self._start_groups()
            self._start_step()
