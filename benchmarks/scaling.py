"""Cost of a GRPO step over the length of prompts and answers, the size of groups, the size of the model, and ranks.

    python benchmarks/scaling.py --picture docs/images/scaling.png

A step is that of `grpo_step.py`: generating, rewards, log-probs, forward and backward, optimizer, weight sync, files.
All but the ranks run in one process of one thread (`launcher=inline`). Costs are CPU seconds, which other programs on
the machine change less than seconds of the clock. Prints a table; an exponent of 1 is a cost that grows like the size.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import grpo_step
import ray
from grpo_step import MeasuredExperiment, Steps, Work

import skyrl_gym
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.process_log import configure_logging

BASE = Work(prompts=4, samples=4, prompt_tokens=64, new_tokens=64)
NUM_RANKS = (1, 2)


@dataclass(frozen=True)
class Sweep:
    """Works that differ in one size."""

    name: str
    sizes: Sequence[int]
    work: Callable[[int], Work]


SWEEPS = (
    Sweep("prompt tokens", (64, 128, 256, 512, 1024), lambda size: replace(BASE, prompt_tokens=size)),
    Sweep("answer tokens", (64, 128, 256, 512), lambda size: replace(BASE, new_tokens=size)),
    Sweep("samples of a prompt", (4, 8, 16, 32), lambda size: replace(BASE, samples=size)),
    Sweep("prompts", (4, 8, 16, 32), lambda size: replace(BASE, prompts=size)),
    Sweep("layers", (4, 8, 16), lambda size: replace(BASE, layers=size)),
    Sweep("hidden size", (256, 512, 1024), lambda size: replace(BASE, hidden=size)),
)


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a step (medians), and seconds of its parts."""

    step: float
    generate: float
    train: float
    sync: float

    @classmethod
    def of(cls, steps: Steps) -> "Cost":
        parts = (steps.median_stage(name) for name in ("generate", "train_critic_and_policy", "sync_weights"))
        return cls(statistics.median(steps.cpu_seconds), *parts)


def measure(work: Work, options: argparse.Namespace, num_ranks: int = 0) -> Cost:
    """Train some steps. `num_ranks`: ranks and engines, each a Ray process; 0: all in this process."""
    num_steps = options.warmup + options.steps
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        folder = Path(name)
        grpo_step.make_model(folder / "model", work)
        rows = grpo_step.make_prompts(work.prompts * num_steps, work.prompt_tokens)
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes = argparse.Namespace(
            steps=options.steps, warmup=options.warmup, ranks=num_ranks or 1, engines=num_ranks or 1, micro_batch=16
        )
        cfg = grpo_step.our_settings(sizes, work, "float32", folder)
        clock = grpo_step.cpu_clock_without([])
        if num_ranks:
            initialize_ray(MeasuredExperiment.validate(cfg))
        else:
            cfg.trainer.placement.launcher = "inline"
            clock = own_cpu_clock
        experiment = MeasuredExperiment(cfg, lambda: None, clock)
        experiment.run()
        ray.shutdown()
    steps = experiment.steps
    for values in (steps.seconds, steps.cpu_seconds, steps.stages):
        del values[: options.warmup]
    return Cost.of(steps)


def own_cpu_clock() -> dict[str, float]:
    return {"driver": time.process_time()}


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Slope of the logarithm of the cost over that of the size, of the last two."""
    return math.log(costs[-1] / costs[-2]) / math.log(sizes[-1] / sizes[-2])


def table(found: dict[str, dict[int, Cost]]) -> str:
    lines = [
        "| size | | CPU s a step | generate (s) | train (s) | sync (s) | exponent at the end: step, generate, train |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, costs in found.items():
        sizes, of_sizes = list(costs), list(costs.values())
        for size, cost in costs.items():
            slopes = ""
            if size == sizes[-1]:
                columns = ([getattr(each, part) for each in of_sizes] for part in ("step", "generate", "train"))
                slopes = ", ".join(f"{exponent(sizes, column):.2f}" for column in columns)
            parts = f"{cost.step:.2f} | {cost.generate:.2f} | {cost.train:.2f} | {cost.sync:.3f}"
            lines.append(f"| {name} | {size} | {parts} | {slopes} |")
    return "\n".join(lines)


def draw(found: dict[str, dict[int, Cost]], path: Path) -> None:
    """Draw the cost of each sweep over its size, both logarithmic, beside a line of exponent 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    for place, (name, costs) in enumerate(found.items(), start=1):
        axes = figure.add_subplot(2, math.ceil(len(found) / 2), place)
        sizes, steps = list(costs), [cost.step for cost in costs.values()]
        axes.loglog(sizes, steps, "o-", label="a step")
        axes.loglog(sizes, [steps[-1] * size / sizes[-1] for size in sizes], ":", color="grey", label="exponent 1")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_yticks(steps, [f"{step:.2f}" for step in steps])
        axes.minorticks_off()
        axes.set_xlabel(name)
        axes.set_ylabel("CPU seconds")
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps that count")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them that do not")
    parser.add_argument("--sweeps", nargs="+", default=[sweep.name for sweep in SWEEPS], help="names of sweeps")
    parser.add_argument("--skip-ranks", action="store_true", help="no measurement over ranks, which needs Ray")
    parser.add_argument("--picture", type=Path, help="PNG file to draw")
    options = parser.parse_args()
    unknown = set(options.sweeps) - {sweep.name for sweep in SWEEPS}
    if unknown:
        parser.error(f"--sweeps {sorted(unknown)}: there are {[sweep.name for sweep in SWEEPS]}")
    configure_logging()
    skyrl_gym.register(id="varied_words", entry_point=grpo_step.VariedWords)
    found: dict[str, dict[int, Cost]] = {}
    load = [os.getloadavg()[0]]
    for sweep in SWEEPS:
        if sweep.name in options.sweeps:
            found[sweep.name] = {size: measure(sweep.work(size), options) for size in sweep.sizes}
            load.append(os.getloadavg()[0])
    if not options.skip_ranks:
        work = replace(BASE, samples=16)
        found["ranks and engines"] = {number: measure(work, options, number) for number in NUM_RANKS}
    print(table(found))
    print("\n".join(["", *grpo_step.machine(load), f"Steps counted: {options.steps}, after {options.warmup} others."]))
    if options.picture is not None:
        draw(found, options.picture)


if __name__ == "__main__":
    main()
