"""Speed-up of a batch of agents by a pipeline of stages, and the cost of the scheduler itself.

    python benchmarks/agent_dispatch.py [--agents 32 16 64] [--seeds 5] [--skip-real]

The real scheduler moves trajectories whose stages only take time: in virtual time (an event loop that leaps to its next
timer; exact, so the machine does not matter), and scaled down with real sleeps. `async_batch_bounded` and
`async_pipeline` get the same stage times and the same places: so many trajectories may ask the model at a time.
A bounded batch has one limit, that of lives under way, so it keeps to the places only by letting no more lives begin;
the pipeline has a limit for each stage.
"""

import argparse
import asyncio
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_agent.agents.trajectory import BaseTrajectory
from skyrl_agent.config.task_file import DispatcherSection, read_task
from skyrl_agent.dispatcher import virtual_time
from skyrl_agent.dispatcher.dispatch import Dispatch
from skyrl_agent.finish import FINISH
from skyrl_agent.tasks.base import BaseTask, Instance

INSTANCES, OF_EACH = 64, 8
CFG = read_task({"task": "any.Task"})


@dataclass(frozen=True)
class Mix:
    """Seconds of each stage: lognormal, by median and sigma."""

    name: str
    medians: tuple[float, float, float]
    sigmas: tuple[float, float, float]

    @property
    def means(self) -> list[float]:
        return [median * math.exp(sigma**2 / 2) for median, sigma in zip(self.medians, self.sigmas, strict=True)]

    @property
    def bound(self) -> float:
        """Speed-up of an infinitely large batch in which the model never waits."""
        return sum(self.means) / self.means[1]

    def draw(self, seed: int, count: int) -> list[list[float]]:
        generator = random.Random(seed)
        pairs = list(zip(self.medians, self.sigmas, strict=True))
        return [[generator.lognormvariate(math.log(median), sigma) for median, sigma in pairs] for _ in range(count)]


def of_means(name: str, means: tuple[float, float, float], sigmas: tuple[float, float, float]) -> Mix:
    a, b, c = (mean / math.exp(sigma**2 / 2) for mean, sigma in zip(means, sigmas, strict=True))
    return Mix(name, (a, b, c), sigmas)


COMPARED = ("async_batch_bounded", "async_pipeline")
HEAVY = (1.0, 0.5, 1.0)
"""Image pulls and test suites have long tails; a run is cut off at its step limit."""
LIGHT = (0.2, 0.2, 0.2)
MIXES = [
    Mix("the paper's, as medians", (20, 100, 30), HEAVY),
    of_means("the paper's, as means", (20, 100, 30), HEAVY),
    of_means("the same, light tails", (20, 100, 30), LIGHT),
    of_means("init-heavy", (80, 100, 30), HEAVY),
    of_means("run-heavy", (10, 300, 10), HEAVY),
    of_means("reward-heavy", (20, 100, 120), HEAVY),
]


class Sleeper(BaseTrajectory):
    """Trajectory whose stages take the seconds that were drawn."""

    generating = most_generating = 0

    def __init__(self, instance: str, trajectory_id: int, seconds: Sequence[float]) -> None:
        nothing: Any = None
        super().__init__(CFG, Instance({}, instance), trajectory_id, nothing, nothing, BaseTask(), {})
        self.seconds = seconds

    async def initialize_trajectory(self) -> None:
        await asyncio.sleep(self.seconds[0])

    async def generate_trajectory(self) -> None:
        Sleeper.generating += 1
        Sleeper.most_generating = max(Sleeper.most_generating, Sleeper.generating)
        await asyncio.sleep(self.seconds[1])
        Sleeper.generating -= 1
        self.result.finish_reason = FINISH

    async def evaluate_trajectory(self) -> None:
        await asyncio.sleep(self.seconds[2])
        self.result.reward = 1.0


async def dispatched(
    section: DispatcherSection, drawn: Sequence[Sequence[float]], scale: float = 1.0
) -> dict[str, float]:
    """The metrics of a batch of OF_EACH trajectories an instance."""
    batch = [
        Sleeper(str(number // OF_EACH), number % OF_EACH, [scale * seconds for seconds in of_one])
        for number, of_one in enumerate(drawn)
    ]
    dispatch = Dispatch(section)
    ended = [trajectory async for trajectory in dispatch.run(batch)]
    assert len(ended) == len(batch) and not any(trajectory.failed for trajectory in ended)
    return dispatch.metrics()


def section(type_name: str, agents: int, **settings: Any) -> DispatcherSection:
    given = {"type": type_name, "max_parallel_agents": agents, "max_eval_parallel_agents": agents}
    return DispatcherSection.model_validate(given | settings)


def both(mix: Mix, agents: int, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the bounded batch and of the pipeline, in virtual time."""
    drawn = mix.draw(seed, INSTANCES * OF_EACH)
    bounded, pipeline = (virtual_time.run(dispatched(section(type_name, agents), drawn)) for type_name in COMPARED)
    return bounded, pipeline


def gain(runs: Sequence[tuple[dict[str, float], dict[str, float]]]) -> str:
    ratios = [bounded["dispatcher/seconds"] / pipeline["dispatcher/seconds"] for bounded, pipeline in runs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def mixes(agents: Sequence[int], seeds: int) -> None:
    places = " | ".join(f"gain, {count} places" for count in agents)
    print(f"| mix | means, s | bound | {places} | at {agents[0]}: seconds | places busy | most alive |")
    print("|---|---|---:|" + "---:|" * len(agents) + "---:|---:|---:|")
    for mix in MIXES:
        runs = {count: [both(mix, count, seed) for seed in range(seeds)] for count in agents}
        gains = " | ".join(gain(runs[count]) for count in agents)
        bounded, pipeline = runs[agents[0]][0]
        shown = [
            f"{bounded[f'dispatcher/{name}']:{form}} -> {pipeline[f'dispatcher/{name}']:{form}}"
            for name, form in (("seconds", ",.0f"), ("generate/utilisation", ".0%"), ("peak_alive", ".0f"))
        ]
        means = " / ".join(f"{mean:.0f}" for mean in mix.means)
        print(f"| {mix.name} | {means} | {mix.bound:.2f} | {gains} | {' | '.join(shown)} |", flush=True)


def more_lives(mix: Mix, agents: int) -> None:
    """The other way to keep as many places busy: a bounded batch of more lives than the model has places."""
    drawn = mix.draw(0, INSTANCES * OF_EACH)
    pipeline = virtual_time.run(dispatched(section("async_pipeline", agents), drawn))["dispatcher/seconds"]
    print(
        "\n| bounded batch of | seconds | the pipeline is | most at a time that ask the model |\n|---|---:|---:|---:|"
    )
    for lives in (agents, round(agents * mix.bound), 2 * agents, 3 * agents):
        Sleeper.most_generating = 0
        seconds = virtual_time.run(dispatched(section("async_batch_bounded", lives), drawn))["dispatcher/seconds"]
        print(f"| {lives} lives | {seconds:,.0f} | {seconds / pipeline:.2f}x | {Sleeper.most_generating} |")


def with_real_sleeps(mix: Mix, agents: int, scale: float) -> None:
    drawn = mix.draw(0, INSTANCES * OF_EACH)
    real = [asyncio.run(dispatched(section(t, agents), drawn, scale))["dispatcher/seconds"] for t in COMPARED]
    virtual = [run["dispatcher/seconds"] * scale for run in both(mix, agents, 0)]
    late = max(took / ideal for took, ideal in zip(real, virtual, strict=True)) - 1
    print(
        f"\nReal sleeps, 1/{1 / scale:.0f} of the seconds, {mix.name}, {agents} places: "
        f"{real[0]:.1f} s -> {real[1]:.1f} s, gain {real[0] / real[1]:.2f} "
        f"(virtual time {virtual[0] / virtual[1]:.2f}); "
        f"at most {late:.1%} later than in virtual time."
    )


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


def many(mix: Mix, agents: int, count: int, scale: float) -> None:
    drawn, given = mix.draw(0, count), section("async_pipeline", agents)
    virtual = virtual_time.run(dispatched(given, drawn))["dispatcher/seconds"] * scale
    cpu = time.process_time()
    metrics, late = asyncio.run(with_lag(dispatched(given, drawn, scale)))
    cpu = time.process_time() - cpu
    seconds, late = metrics["dispatcher/seconds"], sorted(late)
    print(
        f"\n{count:,} trajectories, {agents:,} places, 1/{1 / scale:.0f} of the seconds: {seconds:.1f} s "
        f"for {virtual:.1f} s in virtual time, {metrics['dispatcher/peak_alive']:,.0f} alive at the most, "
        f"{count / seconds:,.0f} done a second, "
        f"{1000 * cpu / count:.2f} ms of CPU each. A timer of 10 ms is late by {1000 * statistics.median(late):.1f} ms "
        f"(p99 {1000 * late[int(0.99 * len(late))]:.0f} ms)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a pipeline of stages gains, and what the scheduler costs.")
    parser.add_argument("--agents", type=int, nargs="+", default=[32, 16, 64], help="places of the model")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--skip-real", action="store_true", help="virtual time alone")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; "
        f"{INSTANCES} x {OF_EACH} trajectories; median of {options.seeds} draws (min - max)\n"
    )
    mixes(options.agents, options.seeds)
    more_lives(MIXES[0], options.agents[0])
    if not options.skip_real:
        with_real_sleeps(MIXES[0], options.agents[0], 1 / 200)
        many(MIXES[0], 2000, 6000, 1 / 100)


if __name__ == "__main__":
    main()
