"""Dispatchers of agents on families of stage times, and the cost of the scheduler itself.

    python benchmarks/agent_dispatch.py [--seeds 5] [--families search pareto] [--skip-real] [--bounds]

The real scheduler moves trajectories whose stages only take time, on machines whose capacities they share
(`skyrl_agent.testing.traces`): in virtual time (an event loop that leaps to its next timer, so this computer does not
matter), and scaled down with real sleeps. `auto` is told the number of runtimes that the machine holds, and nothing
else; fixed dispatchers that hold more are left out.
"""

import argparse
import asyncio
import math
import os
import platform
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.dispatcher.limits import Priority
from skyrl_agent.dispatcher.plan import STAGES
from skyrl_agent.dispatcher.trajectory_state import TrajectoryState
from skyrl_agent.testing.traces import (
    FAMILIES,
    HELD_OUT,
    Family,
    SharedMachine,
    TracedTrajectory,
    Work,
    lognormal,
    lower_bound,
    run_batch,
    run_batches,
)
from skyrl_agent.types import Stage

EPOCHS = 3
"""Batches of which the last is measured."""
FIXED = {
    **{f"bounded {agents}": ("async_batch_bounded", agents) for agents in (32, 64, 128, 256)},
    **{f"pipeline {agents}": ("async_pipeline", agents) for agents in (32, 64, 128, 256)},
    "batch": ("async_batch", 32),
}


def section(type_name: str, agents: int = 32, lives: int | None = None) -> DispatcherSection:
    settings: dict[str, Any] = {"type": type_name, "max_parallel_agents": agents, "max_eval_parallel_agents": agents}
    if lives and type_name in ("auto", "async_pipeline"):
        settings["max_alive"] = lives
    patience = {stage: {"timeout_seconds": 1e9} for stage in STAGES}  # a batch without limits is slow, not late
    return DispatcherSection.model_validate(settings | patience)


@dataclass(frozen=True)
class Run:
    """Seconds of one batch, by dispatcher."""

    bound: float
    fixed: Mapping[str, float]
    first: float
    """`auto` in its first batch."""
    new: float
    """`auto` after other batches of new instances."""
    seen: float
    """`auto` in the third epoch over the same instances."""

    @property
    def best_fixed(self) -> float:
        return min(self.fixed.values())


def run(family: Family, seed: int) -> Run:
    """Measure the last of `EPOCHS` batches under every dispatcher."""
    epochs = [family.batch(seed, epoch) for epoch in range(EPOCHS)]
    others = [family.batch(1000 * (seed + 1) + number) for number in range(EPOCHS - 1)]
    lives = family.machine.lives
    fixed = {}
    for name, (type_name, agents) in FIXED.items():
        [metrics] = run_batches(family, section(type_name, agents, lives), epochs[-1:])
        is_possible = lives is None or metrics["dispatcher/peak_alive"] <= lives
        fixed[name] = metrics["dispatcher/seconds"] if is_possible else math.inf
    auto = section("auto", lives=lives)
    return Run(
        bound=lower_bound(family, epochs[-1]),
        fixed=fixed,
        first=run_batches(family, auto, epochs[-1:])[-1]["dispatcher/seconds"],
        new=run_batches(family, auto, [*others, epochs[-1]])[-1]["dispatcher/seconds"],
        seen=run_batches(family, auto, epochs, named_instances=True)[-1]["dispatcher/seconds"],
    )


def families(names: list[str], seeds: int) -> None:
    """Print a row for each family: medians over seeds."""
    ratios = ("seen / best fixed", "new / best fixed", "worst draw", "bounded 32 / seen", "bounded 64 / seen")
    print(f"| {' | '.join(('family', 'bound, s', 'auto, seen', 'auto, new', 'auto, first', 'best fixed', *ratios))} |")
    print("|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|")
    for family in (*FAMILIES, *HELD_OUT):
        if names and family.name not in names:
            continue
        runs = [run(family, seed) for seed in range(seeds)]
        best = min(FIXED, key=lambda name: median(each.fixed[name] for each in runs))

        def times(name: str, runs: list[Run] = runs) -> str:
            return f"{median(getattr(each, name) / each.bound for each in runs):.2f}"

        columns = [
            family.name,
            f"{median(each.bound for each in runs):,.0f}",
            *map(times, ("seen", "new", "first")),
            f"{best}: {median(each.fixed[best] / each.bound for each in runs):.2f}",
            *(f"{median(getattr(each, name) / each.fixed[best] for each in runs):.2f}" for name in ("seen", "new")),
            f"{max(max(each.seen, each.new) / each.best_fixed for each in runs):.2f}",
            *(f"{median(each.fixed[f'bounded {lives}'] / each.seen for each in runs):.2f}" for lives in (32, 64)),
        ]
        print(f"| {' | '.join(columns)} |", flush=True)


class KnownDurations(Dispatch):
    """Dispatch that knows how long each trajectory will take: the longest go first."""

    def _priority(self, state: TrajectoryState, stage: Stage) -> Priority:
        trajectory = state.trajectory
        assert isinstance(trajectory, TracedTrajectory)
        left = sum(trajectory.work[STAGES.index(stage) :])
        return lambda: (-left, state.position)


def model_bound(family: Family, works: Sequence[Work]) -> float:
    """Compute a lower bound of the seconds of a batch from the model alone: the shortest time, as spans in which n
    trajectories generate, in which each set of the k longest can get its work (a linear program), with the shortest way
    to the model and from it."""
    import numpy as np
    from scipy.optimize import linprog

    longest = np.cumsum(sorted((work[1] for work in works), reverse=True))
    num, first = np.arange(1, len(works) + 1), np.arange(1, len(works) + 1, 5)
    throughput = np.array([family.machine.curves()[1](int(n)) for n in num])
    shares = np.minimum(num, first[:, None]) / num * throughput
    total = throughput[None]  # all of them
    needs = np.concatenate([longest[first - 1], longest[-1:]])
    solved = linprog(np.ones(len(num)), A_ub=-np.concatenate([shares, total]), b_ub=-needs, method="highs")
    return solved.fun + min(work[0] for work in works) + min(work[2] for work in works)


def bounds(names: list[str]) -> None:
    """Print, for one draw of each family, both bounds and the best of some schedules that know all durations."""
    print("| family | bound, s | bound by the model, s | known durations, s | of the higher bound |")
    print("|---|---:|---:|---:|---:|")
    for family in (*FAMILIES, *HELD_OUT):
        if names and family.name not in names:
            continue
        works = family.batch(0, EPOCHS - 1)
        low, by_model = lower_bound(family, works), model_bound(family, works)
        patience = {"timeout_seconds": 1e9}
        known = math.inf
        for agents, judges in ((64, 48), (64, 96), (160, 96)):
            limits = {"initialize": patience | {"parallel": 64}, "generate": patience}
            limits["evaluate"] = patience | {"parallel": judges, "queue": len(works)}
            given = section("async_pipeline", agents, family.machine.lives).model_dump(exclude_none=True) | limits
            dispatch = virtual_time.run(
                run_batch(family, DispatcherSection.model_validate(given), works, dispatch=KnownDurations)
            )
            known = min(known, dispatch["dispatcher/seconds"])
        high = max(low, by_model)
        print(f"| {family.name} | {low:,.0f} | {by_model:,.0f} | {known:,.0f} | {known / high:.2f} |", flush=True)


COST = Family("cost", lognormal((20, 100, 30)), SharedMachine(starts=1e6, places=1e6, graders=1e6))
"""Stages without a capacity: the scheduler alone limits them."""


async def with_lag(work: Awaitable[dict[str, float]]) -> tuple[dict[str, float], list[float]]:
    """Return the result of `work`, and the delay in seconds of each 10 ms timer that runs beside it."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            late.append(time.perf_counter() - due)

    ticking = asyncio.create_task(tick())
    try:
        return await work, late
    finally:
        ticking.cancel()


def with_real_sleeps(type_name: str, agents: int, instances: int, scale: float) -> None:
    """Print how much later a batch ends than in virtual time, and the processor time of a trajectory."""
    works = [(a * scale, b * scale, c * scale) for a, b, c in COST.batch(0, instances=instances)]
    given = section(type_name, agents)
    virtual = run_batches(COST, given, [works])[0]["dispatcher/seconds"]
    cpu = time.process_time()
    metrics, late = asyncio.run(with_lag(run_batch(COST, given, works)))
    cpu = time.process_time() - cpu
    late.sort()
    print(
        f"\n{type_name}, {len(works):,} trajectories, {agents:,} at a time, 1/{1 / scale:.0f} of the seconds: "
        f"{metrics['dispatcher/seconds']:.1f} s for {virtual:.1f} s in virtual time, "
        f"{metrics['dispatcher/peak_alive']:,.0f} alive at the most, {1000 * cpu / len(works):.2f} ms of CPU each. A "
        f"timer of 10 ms is late by {1000 * median(late):.1f} ms (p99 {1000 * late[int(0.99 * len(late))]:.0f} ms)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Dispatchers on families of stage times, and the scheduler's cost.")
    parser.add_argument("--families", nargs="*", default=[], help="names; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--skip-real", action="store_true", help="virtual time alone")
    parser.add_argument("--bounds", action="store_true", help="how near to the bounds known durations come (scipy)")
    options = parser.parse_args()
    if options.bounds:
        bounds(options.families)
        return
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; 64 x 8 "
        f"trajectories; medians of {options.seeds} draws\n"
    )
    families(options.families, options.seeds)
    if not options.skip_real:
        with_real_sleeps("async_pipeline", 2000, 750, 1 / 100)
        with_real_sleeps("auto", 2000, 750, 1 / 100)


if __name__ == "__main__":
    main()
