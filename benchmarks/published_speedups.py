"""Comparison of the simulator of asynchronous training with published speed-ups.

    python benchmarks/published_speedups.py          # about half a minute

The published rows are of verl's fully asynchronous trainer (verl.readthedocs.io, advance/fully_async: Qwen2.5-Math-7B,
DAPO-Math-17k, 512 prompts x 16 answers of at most 28k tokens, H20): seconds of a synchronous step and of its generation
on all GPUs, and of the update and the whole step when half of the GPUs generate.

Taken from there: the update's seconds, the four updates of 128 prompts between weight syncs, and the share of groups
that may be generated ahead. Assumed, as it is not published: lengths are log-normal with mean 3,000 and sigma 0.9, cut
at 28,672; an iteration takes 0.03 ms more for each sequence; 4.2 s between steps. The time of an iteration is fitted to
the synchronous generation. Predicted is the step of the asynchronous run.
"""

import math
import random
from dataclasses import dataclass

from skyrl_train.rollouts.schedule import ScheduleLimits
from skyrl_train.rollouts.simulation import Costs, SampleCost, Simulation

MEAN, SIGMA, LONGEST, SAMPLES = 3000, 0.9, 28672, 16
PROMPTS, UPDATES = 512, 4
SECONDS_PER_SEQUENCE, SYNC_SECONDS = 3e-5, 4.2


@dataclass(frozen=True)
class Published:
    """A pair of runs: all times in seconds, of a step of 512 prompts."""

    gpus: int
    ahead: float
    """Groups that may be generated ahead, as a share of a step (`staleness_threshold`)."""
    synchronous_generation: float
    synchronous_step: float
    update: float
    step: float


ROWS = [
    Published(32, 0.5, 357.41, 790.10, 269.80, 294.77),
    Published(64, 0.5, 150.72, 365.28, 156.98, 189.26),
    Published(128, 0.5, 177.85, 356.30, 113.16, 150.63),
    Published(128, 0.0, 177.85, 356.30, 98.77, 231.34),
]


def groups_of(num: int = 1024) -> list[list[SampleCost]]:
    draw, mu = random.Random(0), math.log(MEAN) - SIGMA**2 / 2
    lengths = iter(lambda: SampleCost(max(16, min(LONGEST, int(draw.lognormvariate(mu, SIGMA))))), None)
    return [[next(lengths) for _ in range(SAMPLES)] for _ in range(num)]


def limits(groups_per_step: int, staleness: int) -> ScheduleLimits:
    return ScheduleLimits(
        groups_per_step=groups_per_step,
        max_staleness_steps=staleness,
        max_running=groups_per_step * (staleness + 1),
        groups_per_epoch=PROMPTS,
        total_steps=400,
        order="finished" if staleness else "exact",
        on_stale="mask",  # their trainer takes every finished group
    )


def costs(engines: int, iteration: float, step: float, sync: float) -> Costs:
    return Costs(
        num_engines=engines,
        seconds_per_iteration=iteration,
        seconds_per_sequence=SECONDS_PER_SEQUENCE,
        step_seconds=step,
        sync_seconds=sync,
    )


def fitted_iteration(groups: list[list[SampleCost]], row: Published) -> float:
    """Return the seconds of an iteration with which synchronous generation takes as long as published."""
    low, high = 1e-4, 0.05
    for _ in range(10):
        middle = (low + high) / 2
        run = Simulation(limits(PROMPTS, 0), groups, costs(row.gpus, middle, 1.0, 0.0)).simulate(2)
        if run.seconds / 2 - 1.0 > row.synchronous_generation:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def predicted_step(groups: list[list[SampleCost]], row: Published, iteration: float) -> float:
    """Return the seconds of a step of 512 prompts, after the first ones."""
    staleness = round(UPDATES * (1 + row.ahead)) - 1
    run = Simulation(
        limits(PROMPTS // UPDATES, staleness),
        groups,
        costs(row.gpus // 2, iteration, row.update / UPDATES, SYNC_SECONDS),
        sync_every_steps=UPDATES,
    ).simulate(8 * UPDATES)
    ends = run.step_ends[UPDATES - 1 :: UPDATES]
    return (ends[-1] - ends[2]) / (len(ends) - 3)


def main() -> None:
    groups = groups_of()
    print("| GPUs | ahead | published step | predicted | published gain | predicted gain | difference |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in ROWS:
        step = predicted_step(groups, row, fitted_iteration(groups, row))
        published, predicted = row.synchronous_step / row.step, row.synchronous_step / step
        print(
            f"| {row.gpus} | {row.ahead:.0%} | {row.step:.0f} s | {step:.0f} s | {published:.2f}x | {predicted:.2f}x "
            f"| {predicted / published - 1:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
