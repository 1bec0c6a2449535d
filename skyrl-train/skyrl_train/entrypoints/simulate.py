"""`python -m skyrl_train.entrypoints.simulate RUN`: what asynchronous training would gain, and with which settings.

Takes the lengths of trajectories and the durations of phases from a run folder (or from options), simulates training
in virtual time on the scheduler that asynchronous runs use, and prints throughput against synchronous training,
utilisation of both sides and ages for several bounds on staleness and numbers of groups under way.

    python -m skyrl_train.entrypoints.simulate runs/my_run
    python -m skyrl_train.entrypoints.simulate --lengths 1000:15,10000:1 --groups 32 --samples 8 --engines 4 \\
        --seconds-per-iteration 0.02 --seconds-per-sequence 0.0002 --step-seconds 30 --sync-seconds 3
    … --gpus 16        # also how many of them should be engines; --engines and --step-seconds are of all of them

With `--gpus`, synchronous training uses all of them for both phases in turn, asynchronous training splits them.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from skyrl_train.errors import ConfigError, DataError, SkyRLError
from skyrl_train.rollouts.schedule import ScheduleLimits
from skyrl_train.rollouts.simulation import Costs, SampleCost, SimulatedRun, Simulation

NUM_STEPS = 60
"""Simulated training steps of each choice."""

STALENESS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Workload:
    """Training as it was measured, or as options describe it."""

    groups: Sequence[Sequence[SampleCost]]
    groups_per_step: int
    costs: Costs

    def describe(self) -> str:
        samples = [sample for group in self.groups for sample in group]
        lengths = [sample.num_tokens for sample in samples]
        costs = self.costs
        return (
            f"{self.groups_per_step} groups of {len(self.groups[0])} samples a step; {fmean(lengths):.0f} tokens a "
            f"sample (at most {max(lengths)}), {fmean(sample.wait_seconds for sample in samples):.3g} s of waiting\n"
            f"{costs.num_engines} engines, an iteration {costs.seconds_per_iteration:.4g} s and "
            f"{costs.seconds_per_sequence:.4g} s a sequence; training {costs.step_seconds:.3g} s a step, weight sync "
            f"{costs.sync_seconds:.3g} s"
        )


@dataclass(frozen=True)
class Choice:
    """Settings of one simulated run, and its figures."""

    limits: ScheduleLimits
    num_engines: int
    run: SimulatedRun


def simulate(workload: Workload, limits: ScheduleLimits, costs: Costs, seed: int = 0) -> Choice:
    return Choice(limits, costs.num_engines, Simulation(limits, workload.groups, costs, seed).simulate(NUM_STEPS))


def limits_of(workload: Workload, max_staleness_steps: int, max_running: int) -> ScheduleLimits:
    num, order = workload.groups_per_step, "finished" if max_staleness_steps else "exact"
    return ScheduleLimits(
        groups_per_step=num, max_staleness_steps=max_staleness_steps, max_running=max_running,
        groups_per_epoch=num * NUM_STEPS, total_steps=10 * NUM_STEPS, order=order,
    )  # fmt: skip


def synchronous(workload: Workload) -> Choice:
    """Simulate generating and training in turns."""
    return simulate(workload, limits_of(workload, 0, workload.groups_per_step), workload.costs)


def choices(workload: Workload, num_gpus: int | None) -> Iterator[Choice]:
    """Simulate asynchronous training for each bound, number of groups under way and split of the GPUs."""
    num = workload.groups_per_step
    for costs in splits(workload.costs, num_gpus):
        for staleness in STALENESS:
            for running in sorted({num, num * (staleness + 1) // 2, num * (staleness + 1)} - set(range(num))):
                yield simulate(workload, limits_of(workload, staleness, running), costs)


def splits(costs: Costs, num_gpus: int | None) -> list[Costs]:
    """Return the costs for each number of engines, which leaves the other GPUs to training: its duration is taken to be
    inverse to their number."""
    if num_gpus is None:
        return [costs]
    if num_gpus % costs.num_engines:
        raise ConfigError(f"--gpus {num_gpus} must be a multiple of the number of engines, {costs.num_engines}")
    gpus_per_engine = num_gpus // costs.num_engines
    return [
        replace(costs, num_engines=num, step_seconds=costs.step_seconds * num_gpus / (num_gpus - num * gpus_per_engine))
        for num in range(1, costs.num_engines)
    ] or [costs]


# ---- measured runs


def measured(folder: Path) -> Workload:
    """Read lengths and durations of a run.

    Raises:
        DataError: the folder holds no finished training step with trajectories.
    """
    import yaml

    from skyrl_train.config import SkyRLConfig
    from skyrl_train.utils.run_folder import RunFolder

    run = RunFolder(folder)
    rows = run.read_metrics() if folder.is_dir() else []
    if any("async/staleness_mean" in row for row in rows):
        raise DataError(
            f"{folder} is a run of asynchronous training, whose metrics do not tell how long a batch takes to "
            "generate; give the folder of a synchronous run of the same data, or --lengths and --seconds-per-iteration"
        )
    metrics = {row["step"]: row for row in rows if "timing/generate" in row}
    files = {file.step: file.path for file in run.trajectory_files() if file.phase == "train"} if metrics else {}
    steps = sorted(metrics.keys() & files.keys())
    if not steps:
        raise DataError(f"{folder} has no finished training step with trajectories (trainer.dump_trajectories=true)")
    cfg = SkyRLConfig.from_dict(yaml.safe_load(run.config_path.read_text()))
    groups, equations = [], []
    for step in steps:
        lengths = _lengths(run.read_trajectories(step, "train"))
        groups += [[SampleCost(num) for num in group] for group in lengths]
        tokens = [num for group in lengths for num in group]
        seconds = metrics[step]["timing/generate"]
        equations.append((max(tokens), sum(tokens) / cfg.generator.num_inference_engines, seconds))
    per_iteration, per_sequence = fit_iteration(equations)
    used = [metrics[step] for step in steps]
    sync = fmean(row.get("timing/sync_weights", 0.0) for row in used)
    costs = Costs(
        num_engines=cfg.generator.num_inference_engines,
        seconds_per_iteration=per_iteration,
        seconds_per_sequence=per_sequence,
        step_seconds=fmean(row["timing/step"] - row["timing/generate"] for row in used) - sync,
        sync_seconds=sync,
    )
    return Workload(groups, cfg.trainer.train_batch_size, costs)


def _lengths(rows: list[dict]) -> list[list[int]]:
    """Return the number of generated tokens of each sample, by group."""
    groups: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        groups[row["uid"]][row["sample"]] += max(1, sum(row["tokens"]["loss_mask"]))
    return [list(samples.values()) for samples in groups.values()]


def fit_iteration(equations: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit (a, b) >= 0 of seconds = a * longest + b * tokens per engine by least squares.

    Args:
        equations: (longest, tokens per engine, seconds) of each step.
    """
    xx, xy, yy, xs, ys = (
        sum(f(x, y, s) for x, y, s in equations)
        for f in (
            lambda x, y, s: x * x,
            lambda x, y, s: x * y,
            lambda x, y, s: y * y,
            lambda x, y, s: x * s,
            lambda x, y, s: y * s,
        )
    )
    determinant = xx * yy - xy * xy
    if determinant > 1e-9 * xx * yy:
        a, b = (xs * yy - ys * xy) / determinant, (ys * xx - xs * xy) / determinant
        if a > 0 and b >= 0:
            return a, b
        if a <= 0:  # an iteration has some cost even so: an engine without it would need no time for one sequence
            return 1e-9, ys / yy
    return xs / xx, 0.0


def described(options: argparse.Namespace) -> Workload:
    """Return the workload that options describe.

    Raises:
        ConfigError: an option is missing or wrong.
    """
    for name in ("lengths", "groups", "seconds_per_iteration", "step_seconds"):
        if getattr(options, name) is None:
            raise ConfigError(f"without a run folder --{name.replace('_', '-')} is needed")
    draw = random.Random(0)
    lengths, weights = _histogram(options.lengths)
    groups = [
        [SampleCost(num, options.wait_seconds) for num in draw.choices(lengths, weights, k=options.samples)]
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


def _histogram(text: str) -> tuple[list[int], list[float]]:
    try:
        pairs = [entry.partition(":") for entry in text.split(",")]
        return [int(length) for length, _, _ in pairs], [float(weight or 1) for _, _, weight in pairs]
    except ValueError:
        raise ConfigError(f"--lengths must be tokens:weight,tokens:weight,…; got {text!r}") from None


# ---- output


def table(baseline: Choice, found: Sequence[Choice]) -> str:
    lines = [
        f"{'S':>3} {'K':>5} {'engines':>7} {'samples/s':>10} {'gain':>6} {'trainer':>8} {'engines':>8}  age mean, max"
    ]
    for choice in [baseline, *found]:
        run = choice.run
        ages = [age for age, count in run.ages.items() for _ in range(count)]
        lines.append(
            f"{choice.limits.max_staleness_steps:3} {choice.limits.max_running:5} {choice.num_engines:7} "
            f"{run.samples_per_second:10.3g} {run.samples_per_second / baseline.run.samples_per_second:5.2f}x "
            f"{run.trainer_utilisation:8.0%} {run.engine_utilisation:8.0%}  {fmean(ages):.1f}, {max(ages)}"
        )
    return "\n".join(lines)


def best(found: Sequence[Choice]) -> Choice:
    """Return the choice of lowest staleness, and fewest groups under way, within 3 % of the highest throughput."""
    most = max(choice.run.samples_per_second for choice in found)
    good = [choice for choice in found if choice.run.samples_per_second >= 0.97 * most]
    return min(good, key=lambda choice: (choice.limits.max_staleness_steps, choice.limits.max_running))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.entrypoints.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="?", help="a run folder; the options below are for those without one")
    parser.add_argument("--gpus", type=int, help="GPUs to be split between engines and training")
    parser.add_argument("--lengths", help="histogram of tokens a sample: tokens:weight,tokens:weight,…")
    parser.add_argument("--groups", type=int, help="prompts of a training step")
    parser.add_argument("--samples", type=int, default=1, help="samples of a prompt")
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--seconds-per-iteration", type=float, help="of one decoding iteration")
    parser.add_argument("--seconds-per-sequence", type=float, default=0.0, help="added to it by each sequence")
    parser.add_argument("--max-sequences", type=int, default=1024, help="that an engine decodes at once")
    parser.add_argument("--wait-seconds", type=float, default=0.0, help="of environments, a sample")
    parser.add_argument("--step-seconds", type=float, help="of a training step without generating and syncing")
    parser.add_argument("--sync-seconds", type=float, default=0.0, help="for which a weight sync stops the engines")
    options = parser.parse_args(arguments)
    try:
        workload = described(options) if options.run is None else measured(options.run)
        baseline, found = synchronous(workload), list(choices(workload, options.gpus))
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    chosen = best(found)
    print(workload.describe())
    print(table(baseline, found))
    print(
        "best: trainer.fully_async.enabled=true trainer.placement.colocate_all=false "
        f"trainer.fully_async.max_staleness_steps={chosen.limits.max_staleness_steps} "
        f"trainer.fully_async.num_parallel_generation_workers={chosen.limits.max_running}"
        + (f", {chosen.num_engines} engines" if options.gpus else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
