"""Simulation of asynchronous training in virtual time, on the scheduler that a run uses.

`python -m skyrl_train.entrypoints.simulate RUN` predicts what asynchronous training gains, and with which settings.

Takes lengths and durations of samples and durations of phases from the folder of a synchronous run, the durations of
groups from an asynchronous one, or both from options; prints throughput against synchronous training, utilisation of
both sides, waits and ages for several bounds on staleness and orders of training. Only groups within the bound count as
throughput.

    python -m skyrl_train.entrypoints.simulate runs/my_run
    python -m skyrl_train.entrypoints.simulate --lengths 1000:15,10000:1 --groups 32 --samples 8 --engines 4 \\
        --seconds-per-iteration 0.02 --seconds-per-sequence 0.0002 --step-seconds 30 --sync-seconds 3
    … --gpus 16        # also how many of them should be engines; --engines and --step-seconds are of all of them

With `--gpus`, synchronous training uses all of them for both phases in turn, asynchronous training splits them.

Model of an engine: all sequences that it decodes gain one token in each of its iterations, and an iteration with c
sequences takes `seconds_per_iteration + c * seconds_per_sequence`. Prefill is part of these figures. An environment's
time occupies no engine. During a weight sync engines pause and keep their sequences.
"""

import argparse
import heapq
import math
import random
import statistics
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean, mode
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from skyrl_train.errors import ConfigError, DataError, SkyRLError
from skyrl_train.rollouts.schedule import GroupScheduler, OnStale, Order, ScheduleLimits
from skyrl_train.utils.run_folder import RunFolder

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.rollouts.groups import FinishedGroup

# ---- costs and figures


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
    """Probability that a group which is generated anew takes as long as before; otherwise it takes as long as another
    group. In a measured run: the share of the variance of samples' durations that lies between prompts."""


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
            self._counter += (now - self._now) / self._seconds_per_token()
            self.busy_seconds += now - self._now
        self._now = now

    def _seconds_per_token(self) -> float:
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
            self.end = self._now + max(0.0, self._heap[0][0] - self._counter) * self._seconds_per_token()


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
                assert self._now < math.inf, f"{self._scheduler.why_not_started()}; {self._scheduler.why_no_batch()}"
                self._end_tokens(engine.pop())
        self._pause(True)  # brings all engines up to now
        run = self.run
        run.trainer_utilisation = self._trainer_seconds / self._now
        busy = sum(engine.busy_seconds for engine in self._engines)
        run.engine_utilisation = busy / (self._now * len(self._engines))
        run.trainer_wait_seconds /= len(run.num_samples)
        run.queue_seconds /= run.ages.total()
        return run

    def _samples(self, ticket: int) -> Sequence[SampleCost]:
        while len(self._drawn) <= ticket:
            self._drawn.append(len(self._drawn) % len(self._groups) if self._in_order else self._draw_group())
        return self._groups[self._drawn[ticket]]

    def _draw_group(self) -> int:
        return self._random.randrange(len(self._groups))

    def _call_later(self, seconds: float, kind: int, function: Callable[[], None]) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (self._now + seconds, kind, self._num_timers, function))

    def _begin_step(self) -> None:
        """Begin a training step, if the trainer is free and the groups are finished."""
        is_busy = self._batch is not None or self._is_syncing or len(self.run.num_samples) == self._num_steps
        if is_busy or (batch := self._scheduler.next_batch()) is None:
            return
        run, step = self.run, self._scheduler.num_trained_steps
        ages = {ticket: step - self._oldest_version.pop(ticket) for ticket in batch}
        trained = [ticket for ticket in batch if ages[ticket] <= self._limits.max_staleness_steps]
        run.ages.update(ages.values())
        run.num_masked += len(batch) - len(trained)
        run.num_samples.append(sum(len(self._samples(ticket)) for ticket in trained))
        run.trainer_wait_seconds += self._now - self._trainer_free_at
        run.queue_seconds += sum(self._now - self._finished_at.pop(ticket) for ticket in batch)
        self._batch = batch
        self._trainer_seconds += self._costs.step_seconds
        self._call_later(self._costs.step_seconds, _STEP_END, self._end_step)

    def _end_step(self) -> None:
        assert self._batch is not None
        self._scheduler.trained(self._batch)
        self._batch = None
        self._restart_stale()
        if self._scheduler.num_trained_steps % self._sync_every_steps:
            self._go_on()
            return
        self._is_syncing = True
        self._pause(True)
        self._call_later(self._costs.sync_seconds, _SYNC_END, self._end_sync)

    def _end_sync(self) -> None:
        self._is_syncing = False
        self._pause(False)
        self._scheduler.synced(self._scheduler.num_trained_steps)
        self._go_on()

    def _go_on(self) -> None:
        """Record the end of a step, and start what it allows."""
        self.run.step_ends.append(self._now)
        self._trainer_free_at = self._now
        self._start_groups()
        self._begin_step()

    def _pause(self, is_paused: bool) -> None:
        for engine in self._engines:
            engine.pause(is_paused, self._now)

    def _start_groups(self) -> None:
        while not self._is_syncing and self._scheduler.may_start():
            ticket = self._scheduler.start()
            self._oldest_version[ticket] = version = self._scheduler.version
            self._open[ticket] = group = _Group(ticket, version)
            for cost in self._samples(ticket):
                engine = min(self._engines, key=attrgetter("load"))
                group.sequences.append(_Sequence(group, cost, engine))
                engine.add(group.sequences[-1], self._now)
            group.num_open = len(group.sequences)

    def _restart_stale(self) -> None:
        for ticket in self._scheduler.take_stale():
            self.run.num_restarted += 1
            if self._random.random() >= self._costs.repeatability:
                self._drawn[ticket] = self._draw_group()
            self._finished_at.pop(ticket, None)
            group = self._open.pop(ticket, None)
            for sequence in group.sequences if group else ():
                sequence.engine.abort(sequence, self._now)

    def _end_tokens(self, sequence: _Sequence) -> None:
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
            self._scheduler.finished(group.ticket, newest)
            self._restart_stale()
            self._start_groups()
            self._begin_step()


# ---- workloads: from options, or measured in a run folder

_CORRECTIONS = ("policy_loss_type=decoupled_ppo", "off_policy_correction.tis_ratio_type=token")


@dataclass(frozen=True)
class Workload:
    """Training as it was measured, or as options describe it."""

    groups: Sequence[Sequence[SampleCost]]
    groups_per_step: int
    costs: Costs
    corrections: Sequence[str] = _CORRECTIONS
    """Settings of the algorithm that correct for stale weights: the best for more than a step of staleness first, for
    one step last; empty: it is corrected already."""

    has_engines: bool = True
    """False: groups take as long as they took in an asynchronous run, however many are generated at once."""

    def __str__(self) -> str:
        samples = [sample for group in self.groups for sample in group]
        lengths, seconds = [s.num_tokens for s in samples], [s.wait_seconds for s in samples]
        costs, head = self.costs, f"{self.groups_per_step} groups of {len(self.groups[0])} samples a step; "
        tail = f"training {costs.step_seconds:.3g} s a step, weight sync {costs.sync_seconds:.3g} s"
        if not self.has_engines:
            return head + f"{fmean(seconds):.3g} s a group (at most {max(seconds):.3g}); {tail}"
        return head + (
            f"{fmean(lengths):.0f} tokens a sample (at most {max(lengths)}), {fmean(seconds):.3g} s of waiting\n"
            f"{costs.num_engines} engines, an iteration {costs.seconds_per_iteration:.4g} s and "
            f"{costs.seconds_per_sequence:.4g} s a sequence; {tail}"
        )


def read_workload(folder: Path) -> Workload:
    """Read lengths and durations of a synchronous run, or durations of an asynchronous one.

    Raises:
        DataError: the folder holds no finished training step with trajectories.
    """
    run = RunFolder(folder)
    rows = run.read_metrics() if folder.is_dir() else []
    if any("async/staleness_mean" in row for row in rows):
        return _read_asynchronous(run)
    metrics = {row["step"]: row for row in rows if "timing/generate" in row}
    files = {file.step for file in run.trajectory_files() if file.phase == "train"} if metrics else set()
    steps = sorted(metrics.keys() & files)
    if not steps:
        raise DataError(f"{folder} has no finished training step with trajectories (trainer.dump_trajectories=true)")
    cfg = _read_config(run)
    num_engines = cfg.generator.num_inference_engines
    lengths = {step: _lengths(step, run.read_trajectories(step, "train")) for step in steps}
    samples = {name: num for by_group in lengths.values() for group in by_group for name, num in group.items()}
    records = [group for record in run.read_timeline() for group in record["groups"]]
    spans = {name: end - start for name, _, start, end, _, _ in records if name in samples}
    per_token = seconds_per_token([(samples[name], seconds) for name, seconds in spans.items()])
    groups, equations = [], []
    for step in steps:
        for group in lengths[step]:
            waits = {name: max(0.0, spans.get(name, 0.0) - num * per_token) for name, num in group.items()}
            groups.append([SampleCost(num, waits[name]) for name, num in group.items()])
        tokens = [num for group in lengths[step] for num in group.values()]
        # Without recorded times all of the time counts as the engines'.
        seconds = max(tokens) * per_token if spans else metrics[step]["timing/generate"]
        equations.append((max(tokens), sum(tokens) / num_engines, seconds))
    per_iteration, per_sequence = fit_iteration(equations)
    used = [metrics[step] for step in steps]
    sync = fmean(row.get("timing/sync_weights", 0.0) for row in used)
    generating = fmean(row["timing/generate"] for row in used)
    costs = Costs(
        num_engines=num_engines,
        seconds_per_iteration=per_iteration,
        seconds_per_sequence=per_sequence,
        step_seconds=fmean(map(_whole_seconds, [None, *used], used)) - generating - sync,
        sync_seconds=sync,
        repeatability=between_share(
            [[each.num_tokens * per_token + each.wait_seconds for each in group] for group in groups]
        ),
    )
    return Workload(groups, cfg.trainer.train_batch_size, costs, _corrections(cfg))


def _whole_seconds(before: dict[str, Any] | None, row: dict[str, Any]) -> float:
    """Return the seconds from one row of metrics to the next, with the logging between two steps, less evaluations,
    exports and checkpoints."""
    step = row["timing/step"]
    if before is None or before["step"] != row["step"] - 1:
        return step
    others = sum(row.get(f"timing/{name}", 0.0) for name in ("eval", "save_checkpoints", "save_hf_model"))
    return max(step, row["time"] - before["time"] - others)


def _read_config(run: RunFolder) -> "SkyRLConfig":
    import yaml

    from skyrl_train.config import SkyRLConfig

    return SkyRLConfig.from_dict(yaml.safe_load(run.config_path.read_text()))


def _corrections(cfg: "SkyRLConfig") -> Sequence[str]:
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reads_rollout_log_probs or algorithm.off_policy_correction.is_on:
        return ()
    # Only the default loss has a decoupled form.
    return _CORRECTIONS if algorithm.policy_loss_type == type(algorithm)().policy_loss_type else _CORRECTIONS[-1:]


def _later_steps(run: RunFolder) -> list[dict[str, Any]]:
    """Return the metrics of the later two thirds of the training steps, in which the queue has filled.

    Raises:
        DataError: there are fewer than two.
    """
    rows = [row for row in run.read_metrics() if "async/staleness_mean" in row]
    rows = rows[len(rows) // 3 :]
    if len(rows) < 2:
        raise DataError(f"{run.path} is an asynchronous run of fewer than 2 steps: too few to measure a step")
    return rows


def _read_asynchronous(run: RunFolder) -> Workload:
    """Read how long the groups of an asynchronous run and the parts of its steps took."""
    rows, cfg = _later_steps(run), _read_config(run)
    records = [group for record in run.read_timeline() for group in record["groups"]]
    seconds = {ticket: end - start for ticket, _, start, end, _, outcome in records if outcome == "finished"}
    mean, num_samples = fmean(seconds.values()), cfg.generator.n_samples_per_prompt
    groups = [[SampleCost(0, seconds.get(ticket, mean))] * num_samples for ticket in range(max(seconds) + 1)]
    sync = fmean(row["timing/sync_weights"] for row in rows)
    waited = fmean(row["timing/wait_for_generation_buffer"] for row in rows)
    whole = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
    costs = Costs(
        num_engines=1,
        seconds_per_iteration=1e-9,
        max_sequences=10**9,
        step_seconds=max(0.0, whole - waited - sync),
        sync_seconds=sync * cfg.trainer.fully_async.sync_every_steps,
    )
    return Workload(groups, cfg.trainer.train_batch_size, costs, _corrections(cfg), has_engines=False)


def replay(folder: Path) -> tuple[float, float]:
    """Return the samples per second that an asynchronous run trained, and of a simulation in which each group takes as
    long as it did, and so do training and syncs on average. Where they differ, the model of the schedule is wrong.
    Groups older than the bound do not count."""
    run = RunFolder(folder)
    rows, cfg, workload = _later_steps(run), _read_config(run), _read_asynchronous(run)
    settings, num = cfg.trainer.fully_async, cfg.trainer.train_batch_size
    num_steps = sum(1 for _ in run.read_timeline())
    limits = ScheduleLimits(
        groups_per_step=num, max_staleness_steps=settings.max_staleness_steps, max_running=settings.max_running(num),
        groups_per_epoch=num * num_steps, total_steps=num_steps, order=settings.order, on_stale=settings.on_stale,
    )  # fmt: skip
    every = settings.sync_every_steps
    simulated = Simulation(limits, workload.groups, workload.costs, sync_every_steps=every, in_order=True).simulate()
    trained = sum(num - row["async/staleness_violation_count"] for row in rows[1:]) * len(workload.groups[0])
    return trained / (rows[-1]["time"] - rows[0]["time"]), simulated.samples_per_second


def _lengths(step: int, rows: list[dict]) -> list[dict[str, int]]:
    """Return the number of generated tokens of each sample by its name in the timeline, for each group."""
    groups: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        groups[row["uid"]][f"{step}:{row['uid']}_{row['sample']}"] += max(1, sum(row["tokens"]["loss_mask"]))
    return [dict(samples) for samples in groups.values()]


def seconds_per_token(samples: Sequence[tuple[int, float]]) -> float:
    """Return the engines' part in the durations of samples: the slope of their durations over their lengths, from 0 to
    the smallest ratio of both. What a sample takes beyond it is the time of its environment.

    Args:
        samples: (tokens, seconds) of each.
    """
    if not samples:
        return 0.0
    least = min(seconds / num for num, seconds in samples)
    lengths, durations = zip(*samples, strict=True)
    if len(set(lengths)) == 1:  # the slope is undefined
        return least
    return min(max(statistics.linear_regression(lengths, durations).slope, 1e-9), least)


def between_share(groups: Sequence[Sequence[float]]) -> float:
    """Return the share of the variance that lies between groups, from 0 to 1: the intraclass correlation of one-way
    analysis of variance, over groups of the commonest size. 1 where it cannot be told."""
    size = mode(map(len, groups))
    rows = [group for group in groups if len(group) == size]
    if size < 2 or len(rows) < 2:
        return 1.0
    means = [fmean(row) for row in rows]
    mean = fmean(means)
    between = size * sum((each - mean) ** 2 for each in means) / (len(rows) - 1)
    within = sum((value - own) ** 2 for row, own in zip(rows, means, strict=True) for value in row)
    within /= len(rows) * (size - 1)
    total = between + (size - 1) * within
    return max(0.0, (between - within) / total) if total else 1.0


def fit_iteration(equations: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit (a, b) >= 0 of seconds = a * longest + b * tokens per engine by least squares.

    Args:
        equations: (longest, tokens per engine, seconds) of each step.
    """
    rows = np.array(equations, dtype=float)
    (xx, xy, xs), (_, yy, ys), _ = (rows.T @ rows).tolist()
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (xs * yy - ys * xy) / determinant, (ys * xx - xs * xy) / determinant
        if a > 0 and b >= 0:
            return a, b
        if a <= 0:  # an iteration has some cost even so: an engine without it would need no time for one sequence
            return 1e-9, ys / yy
    return xs / xx, 0.0


def _described_workload(options: argparse.Namespace) -> Workload:
    """Build the workload that options describe. Raises ConfigError if one is missing or wrong."""
    for name in ("lengths", "groups", "seconds_per_iteration", "step_seconds"):
        if getattr(options, name) is None:
            raise ConfigError(f"without a run folder --{name.replace('_', '-')} is needed")
    try:
        pairs = [entry.partition(":") for entry in options.lengths.split(",")]
        lengths, weights = [int(length) for length, _, _ in pairs], [float(weight or 1) for _, _, weight in pairs]
    except ValueError:
        raise ConfigError(f"--lengths must be tokens:weight,tokens:weight,…; got {options.lengths!r}") from None
    generator = random.Random(0)
    groups = [
        [SampleCost(num, options.wait_seconds) for num in generator.choices(lengths, weights, k=options.samples)]
        for _ in range(512)
    ]
    costs = Costs(
        num_engines=options.engines,
        seconds_per_iteration=options.seconds_per_iteration,
        seconds_per_sequence=options.seconds_per_sequence,
        max_sequences=options.max_sequences,
        step_seconds=options.step_seconds,
        sync_seconds=options.sync_seconds,
    )
    return Workload(groups, options.groups, costs)


# ---- comparison of settings

STALENESS = (1, 2, 4, 8)
Schedule = tuple[Order, OnStale]
SCHEDULES: tuple[Schedule, ...] = (("exact", "regenerate"), ("finished", "regenerate"), ("finished", "mask"))

_NUM_DRAWS = 7
"""Simulations of a schedule that generates groups anew."""

_NEAR = 0.97
"""Share of the highest throughput from which a choice is as good."""

_MAX_MASKED = 0.05
"""Share of masked groups up to which a choice is recommended: they are mostly groups with long responses."""


@dataclass(frozen=True)
class Choice:
    """Settings of one simulated run, and its figures."""

    limits: ScheduleLimits
    num_engines: int
    run: SimulatedRun


def simulate(
    workload: Workload, costs: Costs, staleness: int, max_running: int, schedule: Schedule = SCHEDULES[0]
) -> Choice:
    """Simulate the first 60 steps of a longer run (at its end engines would idle), or fewer large ones, but at least
    three times as many as make the first group too old. Where groups are generated anew, with other durations, take the
    run of the median throughput of several."""
    num = workload.groups_per_step
    limits = ScheduleLimits(
        groups_per_step=num, max_staleness_steps=staleness, max_running=max_running,
        groups_per_epoch=num * 60, total_steps=1000, order=schedule[0], on_stale=schedule[1],
    )  # fmt: skip
    num_steps = max(3 * (staleness + 2), min(60, 12_000 // (num * len(workload.groups[0]))))
    runs: list[SimulatedRun] = []
    for seed in range(_NUM_DRAWS):
        runs.append(Simulation(limits, workload.groups, costs, seed, in_order=True).simulate(num_steps))
        if not runs[0].num_restarted or costs.repeatability == 1:
            break
    runs.sort(key=attrgetter("samples_per_second"))
    return Choice(limits, costs.num_engines, runs[len(runs) // 2])


def simulate_synchronous(workload: Workload) -> Choice:
    """Simulate training that alternates between generating and updating."""
    return simulate(workload, workload.costs, 0, workload.groups_per_step)


def simulate_choices(workload: Workload, num_gpus: int | None) -> list[Choice]:
    """Simulate asynchronous training for each bound and schedule, with the best split of the GPUs for the bound, and
    for the best of them with fewer groups in flight."""
    choices: list[Choice] = []
    possible, num = _splits(workload, num_gpus), workload.groups_per_step
    split, step = len(possible) // 2, max(1, len(possible) // 4)
    for staleness in STALENESS:
        most = num * (staleness + 1)
        simulate_split = partial(_simulate_split, workload, possible, staleness, most, {})
        split, step = maximum(lambda i, f=simulate_split: f(i).run.samples_per_second, len(possible), split, step), 1
        choices.append(simulate_split(split))
        choices += [simulate(workload, possible[split], staleness, most, schedule) for schedule in SCHEDULES[1:]]
    best = choose(choices)
    limits, costs = best.limits, next(costs for costs in possible if costs.num_engines == best.num_engines)
    for running in sorted({limits.max_running * part // 4 for part in (1, 2, 3)} - set(range(num))):
        schedule = (limits.order, limits.on_stale)
        choices.append(simulate(workload, costs, limits.max_staleness_steps, running, schedule))
    return choices


def _simulate_split(
    workload: Workload, possible: list[Costs], staleness: int, most: int, known: dict[int, Choice], split: int
) -> Choice:
    """Simulate a split of the GPUs, once."""
    if split not in known:
        known[split] = simulate(workload, possible[split], staleness, most)
    return known[split]


def maximum(function: Callable[[int], float], num: int, start: int, step: int) -> int:
    """Return where in range(num) a function with one maximum has it, from `start` by steps that become smaller."""
    while step:
        better = [each for each in (start - step, start + step) if 0 <= each < num and function(each) > function(start)]
        if better:
            start = max(better, key=function)
        else:
            step //= 2
    return start


def _splits(workload: Workload, num_gpus: int | None) -> list[Costs]:
    """Return the costs for each number of engines, which leaves the other GPUs to training: its duration is taken to be
    inverse to their number."""
    costs = workload.costs
    if num_gpus is None:
        return [costs]
    if not workload.has_engines:
        raise ConfigError(
            "--gpus needs lengths of responses and the speed of an engine, and the folder of an asynchronous run has "
            "durations of groups alone: give the folder of a synchronous run, or --lengths and --seconds-per-iteration"
        )
    if num_gpus % costs.num_engines:
        raise ConfigError(f"--gpus {num_gpus} must be a multiple of the number of engines, {costs.num_engines}")
    gpus_per_engine = num_gpus // costs.num_engines
    return [
        replace(costs, num_engines=num, step_seconds=costs.step_seconds * num_gpus / (num_gpus - num * gpus_per_engine))
        for num in range(1, costs.num_engines)
    ] or [costs]


def choose(choices: Sequence[Choice]) -> Choice:
    """Return the choice of lowest staleness, and fewest groups in flight, within 3 % of the highest throughput of the
    choices that mask few groups."""
    honest = [choice for choice in choices if choice.run.masked_share <= _MAX_MASKED]
    most = max(choice.run.samples_per_second for choice in honest)
    good = [choice for choice in honest if choice.run.samples_per_second >= _NEAR * most]
    return min(good, key=lambda choice: (choice.limits.max_staleness_steps, choice.limits.max_running))


# ---- command


def format_table(workload: Workload, baseline: Choice, choices: Sequence[Choice]) -> str:
    """Return a line for each choice. Waits: seconds a step for which the trainer waits for groups, and seconds that a
    finished group waits for its step."""
    lines = [
        f"{'order':8} {'stale':10} {'S':>2} {'K':>5} {'engines':>7} {'samples/s':>9} {'gain':>6} {'trainer':>7} "
        f"{'engines':>7} {'wait':>6} {'queue':>6} {'masked':>6} {'anew':>5}  ages 0, 1, …, above S in %"
    ]
    for choice in [baseline, *choices]:
        run, limits = choice.run, choice.limits
        bound, num = limits.max_staleness_steps, run.ages.total()
        shares = [f"{100 * run.ages[age] / num:.0f}" for age in range(bound + 1)]
        above = [f"{run.masked_share:.0%}".rstrip("%")] if limits.on_stale == "mask" else []
        on_stale = "" if limits.order == "exact" else limits.on_stale
        gain = run.samples_per_second / baseline.run.samples_per_second
        num_engines, busy = (choice.num_engines, f"{run.engine_utilisation:.0%}") if workload.has_engines else ("", "")
        lines.append(
            f"{limits.order if bound else 'synchron':8} {on_stale:10} {bound:2} {limits.max_running:5} "
            f"{num_engines:7} {run.samples_per_second:9.3g} {gain:5.2f}x {run.trainer_utilisation:7.0%} {busy:>7} "
            f"{run.trainer_wait_seconds:6.3g} {run.queue_seconds:6.3g} {run.masked_share:6.0%} "
            f"{run.restarted_share:5.0%}  {' '.join([*shares, *above])}"
        )
    return "\n".join(lines)


def format_overrides(workload: Workload, choice: Choice, num_gpus: int | None) -> str:
    """Return a choice as settings to append to the command of a run."""
    limits, name = choice.limits, "trainer.fully_async"
    settings = [
        f"{name}.enabled=true",
        "trainer.placement.colocate_all=false",
        f"{name}.max_staleness_steps={limits.max_staleness_steps}",
        f"{name}.num_parallel_generation_workers={limits.max_running}",
        f"{name}.order={limits.order}",
        f"{name}.on_stale={limits.on_stale}",
    ]
    if workload.corrections:
        # Measured in docs/asynchronous.md: at more than a step, truncated weights cost more reward.
        correction = workload.corrections[0 if limits.max_staleness_steps > 1 else -1]
        settings.append(f"trainer.algorithm.{correction}")
    if num_gpus is not None:
        settings.append(f"generator.num_inference_engines={choice.num_engines}")
    return " ".join(settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.entrypoints.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="?", help="a run folder; the options below are for use without one")
    for name, kind, default, text in (
        ("gpus", int, None, "GPUs to be split between engines and training"),
        ("lengths", str, None, "histogram of tokens a sample: tokens:weight,tokens:weight,…"),
        ("groups", int, None, "prompts of a training step"),
        ("samples", int, 1, "samples of a prompt"),
        ("engines", int, 1, "number of engines"),
        ("seconds-per-iteration", float, None, "of one decoding iteration"),
        ("seconds-per-sequence", float, 0.0, "added to it by each sequence"),
        ("max-sequences", int, 1024, "that an engine decodes at once"),
        ("wait-seconds", float, 0.0, "of environments, a sample"),
        ("step-seconds", float, None, "of a training step without generating and syncing"),
        ("sync-seconds", float, 0.0, "for which a weight sync pauses the engines"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns: the exit status."""
    options = _parser().parse_args(arguments)
    try:
        workload = _described_workload(options) if options.run is None else read_workload(options.run)
        baseline, choices = simulate_synchronous(workload), simulate_choices(workload, options.gpus)
        if options.run is not None and not workload.has_engines:
            print("this run: {:.3g} samples/s; {:.3g} in a simulation of its schedule".format(*replay(options.run)))
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    best = choose(choices)
    print(workload)
    print(format_table(workload, baseline, choices))
    print("best (lowest S and K within 3 % of the highest throughput; at most 5 % masked), to append to a command:")
    print(format_overrides(workload, best, options.gpus))
    if options.gpus:
        num = best.num_engines * options.gpus // workload.costs.num_engines
        print(f"# {num} GPUs for {best.num_engines} engines, {options.gpus - num} for training")
    return 0


# ---- advice during a run

INTERVAL = 10
"""Steps between two pieces of advice."""

_SIMULATED_STEPS = 30
_IDLE = 0.25
"""Share of the time from which a side counts as idle."""

_SAMPLE_SIZE = "policy/rollout_train_ess"
_MIN_SAMPLE_SIZE = 0.9
"""Effective sample size below which runs with a correction learned less (docs/asynchronous.md)."""

_MAX_STALE = 0.05
"""Share of generated tokens that are masked as too old, mostly of long responses, that causes a warning."""


class Adviser:
    """Throughput statistics of recent steps of a schedule, and advice on settings that would make them faster."""

    def __init__(self, limits: ScheduleLimits):
        self._limits = limits
        self._groups: deque[float] = deque(maxlen=INTERVAL * limits.groups_per_step)
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=INTERVAL)
        self._metrics: deque[Mapping[str, float | None]] = deque(maxlen=INTERVAL)

    def record(
        self,
        groups: list["FinishedGroup"],
        step_seconds: float,
        sync_seconds: float,
        waited_seconds: float,
        metrics: Mapping[str, float | None],
    ) -> None:
        """Record a training step.

        Args:
            groups: that it trained.
            step_seconds: of the step without waiting for groups and without the weight sync.
            waited_seconds: for groups.
            metrics: of the step (`pool_metrics`, `group_metrics`, mismatch with the engines).
        """
        self._groups.extend(group.seconds for group in groups)
        self._steps.append((step_seconds, sync_seconds, waited_seconds))
        self._metrics.append(dict(metrics))

    def predict(self) -> dict[str, float]:
        """Return the utilisation in a simulation of the measured durations, under `async/`. Groups take as long as they
        took, however many run: what differs from the measurement is the engines' share in it."""
        costs = Costs(
            num_engines=1,
            seconds_per_iteration=1e-9,
            max_sequences=self._limits.max_running,
            step_seconds=fmean(step for step, _, _ in self._steps),
            sync_seconds=fmean(sync for _, sync, _ in self._steps),
        )
        groups = [[SampleCost(0, seconds)] for seconds in self._groups]
        run = Simulation(self._limits, groups, costs).simulate(min(_SIMULATED_STEPS, self._limits.total_steps))
        return {"async/predicted_trainer_utilisation": run.trainer_utilisation}

    def advise(self, predicted: Mapping[str, float]) -> str:
        """Return one line for the log, about the last steps: a single one may show the opposite of the rest.

        Args:
            predicted: result of `predict`.
        """
        return "; before that: ".join([self._throughput_advice(predicted), *self._warnings()])

    def _mean(self, name: str) -> float | None:
        """Return the mean of a metric over the steps that have it, weighted by their seconds; None if none has."""
        values = [(metrics.get(name), sum(step)) for metrics, step in zip(self._metrics, self._steps, strict=True)]
        known = [(value, weight) for value, weight in values if value is not None]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    def _warnings(self) -> list[str]:
        warnings = []
        stale = self._mean("async/stale_token_share") or 0.0
        if stale > _MAX_STALE:
            warnings.append(
                f"{stale:.0%} of the generated tokens are too old and not trained (trainer.fully_async.on_stale=mask), "
                "mostly of long responses: set on_stale=regenerate or order=exact, or raise max_staleness_steps"
            )
        sample_size = self._mean(_SAMPLE_SIZE)
        if self._limits.max_staleness_steps and sample_size is not None and sample_size < _MIN_SAMPLE_SIZE:
            warnings.append(
                f"{_SAMPLE_SIZE}={sample_size:.2f} says that the policy has left the one that generated, which can "
                "cost reward: lower trainer.fully_async.max_staleness_steps, the learning rate or the updates of a step"
            )
        return warnings

    def _throughput_advice(self, predicted: Mapping[str, float]) -> str:
        trainer, slots = (self._mean(f"async/{name}_utilisation") or 0.0 for name in ("trainer", "slot"))
        text = (
            f"trainer busy {trainer:.0%} of the last {len(self._steps)} steps (predicted "
            f"{predicted['async/predicted_trainer_utilisation']:.0%}), {slots:.0%} of the slots in use: "
        )
        largest = self._limits.groups_per_step * (self._limits.max_staleness_steps + 1)
        if trainer >= 1 - _IDLE and slots >= 1 - _IDLE:
            return text + "both sides are busy"
        if trainer >= 1 - _IDLE:
            return text + (
                "training is the bottleneck and engines idle: give some of their GPUs to training, or lower "
                "trainer.fully_async.max_staleness_steps, which trains on newer tokens at the same speed"
            )
        if slots < 1 - _IDLE:
            return text + "groups wait for slots: raise trainer.fully_async.max_staleness_steps"
        if self._limits.max_running < largest:
            return text + f"raise trainer.fully_async.num_parallel_generation_workers (at most {largest})"
        return text + "generation is the bottleneck: add engines, or raise trainer.fully_async.max_staleness_steps"
