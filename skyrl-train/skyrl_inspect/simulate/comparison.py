"""Comparison of asynchronous settings by simulation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from skyrl_inspect.simulate.simulator import Costs, SimulatedRun, Simulation
from skyrl_inspect.simulate.workloads import Workload
from skyrl_train.errors import ConfigError
from skyrl_train.rollouts.schedule import OnStale, Order, ScheduleLimits

STALENESS = (1, 2, 4, 8)
Schedule = tuple[Order, OnStale]
SCHEDULES: tuple[Schedule, ...] = (("exact", "regenerate"), ("finished", "regenerate"), ("finished", "mask"))

_NUM_DRAWS = 7
"""Simulations of a schedule that regenerates groups."""

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
    """Simulate the first 60 steps of a longer run (engines idle at the end of a run), or fewer large ones, but at least
    three times the steps after which the first group is stale. If groups are regenerated, with other durations, return
    the run of median throughput.
    """
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
    possible, num = _list_splits(workload, num_gpus), workload.groups_per_step
    split, step = len(possible) // 2, max(1, len(possible) // 4)
    for staleness in STALENESS:
        most = num * (staleness + 1)
        simulate_split = partial(_simulate_split, workload, possible, staleness, most, {})
        split, step = (
            find_maximum(lambda i, f=simulate_split: f(i).run.samples_per_second, len(possible), split, step),
            1,
        )
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


def find_maximum(function: Callable[[int], float], num: int, start: int, step: int) -> int:
    """Return where in range(num) a function with one maximum has it, from `start` by steps that become smaller."""
    while step:
        better = [each for each in (start - step, start + step) if 0 <= each < num and function(each) > function(start)]
        if better:
            start = max(better, key=function)
        else:
            step //= 2
    return start


def _list_splits(workload: Workload, num_gpus: int | None) -> list[Costs]:
    """Return the costs for each number of engines, which leaves the other GPUs to training: its duration is taken to be
    inverse to their number."""
    costs = workload.costs
    if num_gpus is None:
        return [costs]
    if not workload.has_engines:
        raise ConfigError(
            "--gpus needs response lengths and the engine's speed, but the folder of an asynchronous run records "
            "only durations of groups: pass the folder of a synchronous run, or --lengths and --seconds-per-iteration"
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
