"""Families of stage times, and machines on which they run in virtual time: for comparisons of schedulers."""

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.config.task_file import DispatcherSection, read_task
from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.capacity import Capacity
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.errors import InfraError
from skyrl_agent.finish import FINISH
from skyrl_agent.tasks.base import BaseTask, Instance

Work = tuple[float, float, float]
"""Seconds of initialize, generate and evaluate of one trajectory that has the machine for itself."""

Curve = Callable[[int], float]
"""Number of trajectories at work at a time -> sum of their speeds; the speed of one alone is 1."""

CFG = read_task({"task": "any.Task"})


@dataclass(frozen=True)
class SharedMachine:
    """SharedMachine on which a batch runs. Trajectories beyond a capacity share it."""

    starts: float = 64.0
    """Runtimes that start at full speed at a time."""
    places: float = 64.0
    """Trajectories that the model serves at full speed at a time."""
    graders: float = 64.0
    """Evaluations that run at full speed at a time."""
    lives: int | None = None
    """Runtimes that it can hold; None: as many as there are trajectories."""
    saturates: bool = False
    """The model approaches its capacity gradually: n trajectories have the speed places * (1 - exp(-n / places))."""
    failing_starts: float = 0.0
    """Share of starts that fail at the end of their time."""

    def curves(self) -> tuple[Curve, Curve, Curve]:
        places = self.places
        model: Curve = lambda n: min(n, places)  # noqa: E731
        if self.saturates:
            model = lambda n: places * (1 - math.exp(-n / places))  # noqa: E731
        return (lambda n: min(n, self.starts)), model, (lambda n: min(n, self.graders))


Values = tuple[float, float, float]
"""Standard normal values of an instance, one for each stage."""

Draw = Callable[[random.Random, Values], Work]
"""(generator, values of the instance) -> work of one trajectory."""

OWN_SHARE = 0.5
"""Weight of a trajectory's own value beside its instance's, of which the squares add up to 1."""


def _mixed(generator: random.Random, value: float) -> float:
    return math.sqrt(1 - OWN_SHARE**2) * value + OWN_SHARE * generator.gauss(0, 1)


def lognormal(medians: Work, sigmas: Work = (0.6, 0.6, 0.6), signs: Values | None = None) -> Draw:
    """Lognormal stage times.

    Args:
        signs: of the second stage's value in each stage; None: each stage has a value of its own.
    """

    def draw(generator: random.Random, values: Values) -> Work:
        values = (signs[0] * values[1], values[1], signs[2] * values[1]) if signs else values
        seconds = [
            median * math.exp(sigma * _mixed(generator, value))
            for median, sigma, value in zip(medians, sigmas, values, strict=True)
        ]
        return seconds[0], seconds[1], seconds[2]

    return draw


def _rank(generator: random.Random, value: float) -> float:
    return 0.5 * (1 + math.erf(_mixed(generator, value) / math.sqrt(2)))


def _pareto(generator: random.Random, values: Values) -> Work:
    rank = _rank(generator, values[1])
    return 20.0, min(40 * (1 - rank) ** (-1 / 1.5), 2000.0), 30.0


def _bimodal(generator: random.Random, values: Values) -> Work:
    is_long = _mixed(generator, values[1]) > 0.84  # one in five
    return 20.0, (400.0 if is_long else 40.0) * generator.uniform(0.8, 1.2), 30.0


@dataclass(frozen=True)
class Family:
    """Stage times and the machine."""

    name: str
    draw: Draw
    machine: SharedMachine = field(default_factory=SharedMachine)

    def batch(self, seed: int, epoch: int = 0, instances: int = 64, of_each: int = 8) -> list[Work]:
        """Draw a batch, instance by instance. Batches of one seed have the same instances."""
        values = random.Random(f"{self.name} {seed}")
        generator = random.Random(f"{self.name} {seed} {epoch}")
        drawn = [(values.gauss(0, 1), values.gauss(0, 1), values.gauss(0, 1)) for _ in range(instances)]
        return [self.draw(generator, value) for value in drawn for _ in range(of_each)]

    def failing(self, works: Sequence[Work]) -> list[bool]:
        """Return which trajectories of a batch need two starts."""
        generator = random.Random(repr(works[0]))
        return [generator.random() < self.machine.failing_starts for _ in works]


FAMILIES = (
    Family("lognormal", lognormal((20, 100, 30), (1.0, 0.5, 1.0))),
    Family("pareto", _pareto),
    Family("bimodal", _bimodal),
    Family("correlated", lognormal((20, 100, 30), signs=(1, 1, 1))),
    Family("anti-correlated", lognormal((20, 100, 30), signs=(-1, 1, -1))),
    Family("start failures", lognormal((40, 100, 20)), SharedMachine(starts=24, failing_starts=0.15)),
    Family("long SWE", lognormal((60, 900, 240), (0.5, 0.6, 0.6)), SharedMachine(lives=160, starts=32)),
    Family("reward-heavy", lognormal((20, 100, 120), (1.0, 0.5, 1.0)), SharedMachine(graders=48)),
    Family("search", lognormal((0.1, 30, 0.1)), SharedMachine(starts=512, graders=512)),
    Family("saturating GPU", lognormal((20, 100, 30)), SharedMachine(places=48, saturates=True)),
)


class SharedStage:
    """Capacity shared equally by those at work. Each has done its work when the clock of work, which runs at the
    speed of one of them, has advanced by it."""

    def __init__(self, curve: Curve) -> None:
        self._curve = curve
        self._work_clock = self._updated = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def work(self, seconds: float) -> None:
        """Wait until `seconds` of work are done."""
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (self._work_clock + seconds, next(self._numbers), done))
        self._set_timer()
        await done

    def _speed(self) -> float:
        count = len(self._ends)
        return self._curve(count) / count

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ends:
            self._work_clock += (now - self._updated) * self._speed()
        self._updated = now

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
        if self._ends:
            wait = max(self._ends[0][0] - self._work_clock, 0.0) / self._speed()
            self._timer = asyncio.get_running_loop().call_later(wait, self._finish_first)

    def _finish_first(self) -> None:
        self._advance()
        self._work_clock = max(self._work_clock, self._ends[0][0])
        heapq.heappop(self._ends)[2].set_result(None)
        self._set_timer()


class TracedTrajectory(BaseTrajectory):
    """Trajectory whose stages take shares of a machine's time."""

    def __init__(self, number: int, of_each: int, work: Work, stages: Sequence[SharedStage], failures: int) -> None:
        absent: Any = None
        super().__init__(CFG, Instance({}, str(number // of_each)), number % of_each, absent, absent, BaseTask(), {})
        self.work, self.stages, self.failures = work, stages, failures

    async def initialize_trajectory(self) -> None:
        await self.stages[0].work(self.work[0])
        if self.failures:
            self.failures -= 1
            raise InfraError("the runtime did not start")

    async def generate_trajectory(self) -> None:
        await self.stages[1].work(self.work[1])
        self.result.finish_reason = FINISH

    async def evaluate_trajectory(self) -> None:
        await self.stages[2].work(self.work[2])
        self.result.reward = 1.0


def run_batches(
    family: Family,
    section: DispatcherSection,
    batches: Sequence[Sequence[Work]],
    of_each: int = 8,
    named_instances: bool = False,
) -> list[dict[str, float]]:
    """Run batches one after another in virtual time, by one runner's capacity. Returns: the dispatcher's metrics."""

    async def run() -> list[dict[str, float]]:
        capacity = Capacity(section, named_instances=named_instances)
        return [await _run_batch(family, section, works, of_each, capacity) for works in batches]

    return virtual_time.run(run())


async def _run_batch(
    family: Family, section: DispatcherSection, works: Sequence[Work], of_each: int, capacity: Capacity
) -> dict[str, float]:
    stages = [SharedStage(curve) for curve in family.machine.curves()]
    trajectories = [
        TracedTrajectory(number, of_each, work, stages, fails)
        for number, (work, fails) in enumerate(zip(works, family.failing(works), strict=True))
    ]
    scheduler = Dispatch(section, capacity=capacity)
    async for trajectory in scheduler.run(trajectories):
        assert not trajectory.failed, trajectory.result.failure
    return scheduler.metrics()


def lower_bound(family: Family, works: Sequence[Work]) -> float:
    """Compute a lower bound of the seconds of a batch, as for a flow shop with parallel machines: for each stage of
    capacity m, (its work + the m shortest ways to it + the m shortest ways from it to the end) / m; the longest
    trajectory; the work of all over the lives."""
    machine = family.machine
    works = [(a * (1 + fails), b, c) for (a, b, c), fails in zip(works, family.failing(works), strict=True)]
    bounds = [max(sum(work) for work in works)]
    for stage, capacity in enumerate((machine.starts, machine.places, machine.graders)):
        m = min(int(capacity), len(works))
        heads = sorted(sum(work[:stage]) for work in works)[:m]
        tails = sorted(sum(work[stage + 1 :]) for work in works)[:m]
        bounds.append(sum(work[stage] for work in works) / capacity + (sum(heads) + sum(tails)) / m)
    if machine.lives is not None:
        bounds.append(sum(sum(work) for work in works) / machine.lives)
    return max(bounds)
