"""`python -m skyrl_train.entrypoints.simulate RUN`: what asynchronous training would gain, and with which settings.

Takes lengths and durations of samples and durations of phases from the folder of a synchronous run, the durations of
groups from that of an asynchronous one, or both from options; simulates training in virtual time on the scheduler that
asynchronous runs use, and prints throughput against synchronous training, utilisation of both sides, waits and ages for
several bounds on staleness and orders of training. Only groups within the bound count as throughput.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from skyrl_train.errors import ConfigError, DataError, SkyRLError
from skyrl_train.rollouts.schedule import OnStale, Order, ScheduleLimits
from skyrl_train.rollouts.simulation import Costs, SampleCost, SimulatedRun, Simulation
from skyrl_train.utils.run_folder import RunFolder

if TYPE_CHECKING:
    from skyrl_train.config import SkyRLConfig

STALENESS = (1, 2, 4, 8)
SCHEDULES: tuple[tuple[Order, OnStale], ...] = (
    ("exact", "regenerate"),
    ("finished", "regenerate"),
    ("finished", "mask"),
)

_NEAR = 0.97
"""Share of the highest throughput from which a choice is as good."""

_MAX_MASKED = 0.05
"""Share of masked groups up to which a choice is recommended: they are mostly those with long answers."""


_CORRECTIONS = ("policy_loss_type=decoupled_ppo", "off_policy_correction.tis_ratio_type=token")


@dataclass(frozen=True)
class Workload:
    """Training as it was measured, or as options describe it."""

    groups: Sequence[Sequence[SampleCost]]
    groups_per_step: int
    costs: Costs
    corrections: Sequence[str] = _CORRECTIONS
    """Settings of the algorithm that correct for the policy that generated, the best of more than a step of staleness
    first and of one step last; empty: it is corrected already."""

    has_engines: bool = True
    """False: groups take as long as they took in an asynchronous run, however many are generated at once."""

    def describe(self) -> str:
        samples = [sample for group in self.groups for sample in group]
        lengths = [sample.num_tokens for sample in samples]
        seconds = [sample.wait_seconds for sample in samples]
        costs, head = self.costs, f"{self.groups_per_step} groups of {len(self.groups[0])} samples a step; "
        tail = f"training {costs.step_seconds:.3g} s a step, weight sync {costs.sync_seconds:.3g} s"
        if not self.has_engines:
            return head + f"{fmean(seconds):.3g} s a group (at most {max(seconds):.3g}); {tail}"
        return head + (
            f"{fmean(lengths):.0f} tokens a sample (at most {max(lengths)}), {fmean(seconds):.3g} s of waiting\n"
            f"{costs.num_engines} engines, an iteration {costs.seconds_per_iteration:.4g} s and "
            f"{costs.seconds_per_sequence:.4g} s a sequence; {tail}"
        )


@dataclass(frozen=True)
class Choice:
    """Settings of one simulated run, and its figures."""

    limits: ScheduleLimits
    num_engines: int
    run: SimulatedRun


def simulate(workload: Workload, limits: ScheduleLimits, costs: Costs, seed: int = 0) -> Choice:
    """Simulate the first 60 steps of a longer run (at its end engines would idle), or fewer large ones, but at least
    thrice those until a group that was started first is too old."""
    num_samples = workload.groups_per_step * len(workload.groups[0])
    num_steps = max(3 * (limits.max_staleness_steps + 2), min(60, 12_000 // num_samples))
    return Choice(limits, costs.num_engines, Simulation(limits, workload.groups, costs, seed).simulate(num_steps))


def limits_of(
    workload: Workload, max_staleness_steps: int, max_running: int, order: Order, on_stale: OnStale
) -> ScheduleLimits:
    num = workload.groups_per_step
    return ScheduleLimits(
        groups_per_step=num, max_staleness_steps=max_staleness_steps, max_running=max_running,
        groups_per_epoch=num * 60, total_steps=1000, order=order, on_stale=on_stale,
    )  # fmt: skip


def synchronous(workload: Workload) -> Choice:
    """Simulate generating and training in turns."""
    return simulate(workload, limits_of(workload, 0, workload.groups_per_step, "exact", "regenerate"), workload.costs)


def choices(workload: Workload, num_gpus: int | None) -> list[Choice]:
    """Simulate asynchronous training for each bound and schedule, with the best split of the GPUs for the bound, and
    for the best of them with fewer groups under way."""
    found: list[Choice] = []
    possible = splits(workload, num_gpus)
    split, step = len(possible) // 2, max(1, len(possible) // 4)
    for staleness in STALENESS:
        most = workload.groups_per_step * (staleness + 1)
        order, on_stale = SCHEDULES[0]
        limits = limits_of(workload, staleness, most, order, on_stale)
        by_split: dict[int, Choice] = {}

        def throughput(split: int, limits: ScheduleLimits = limits, known: dict[int, Choice] = by_split) -> float:
            if split not in known:
                known[split] = simulate(workload, limits, possible[split])
            return known[split].run.samples_per_second

        split, step = maximum(throughput, len(possible), split, step), 1
        throughput(split)
        found.append(by_split[split])
        found += [
            simulate(workload, limits_of(workload, staleness, most, order, on_stale), possible[split])
            for order, on_stale in SCHEDULES[1:]
        ]
    chosen, num = best(found), workload.groups_per_step
    costs = next(costs for costs in possible if costs.num_engines == chosen.num_engines)
    for running in sorted({chosen.limits.max_running * part // 4 for part in (1, 2, 3)} - set(range(num))):
        found.append(simulate(workload, replace(chosen.limits, max_running=running), costs))
    return found


def maximum(function: Callable[[int], float], num: int, place: int, step: int) -> int:
    """Return where in range(num) a function with one maximum has it, from `place` by steps that become smaller."""
    while step:
        better = [each for each in (place - step, place + step) if 0 <= each < num and function(each) > function(place)]
        if better:
            place = max(better, key=function)
        else:
            step //= 2
    return place


def splits(workload: Workload, num_gpus: int | None) -> list[Costs]:
    """Return the costs for each number of engines, which leaves the other GPUs to training: its duration is taken to be
    inverse to their number."""
    costs = workload.costs
    if num_gpus is None:
        return [costs]
    if not workload.has_engines:
        raise ConfigError(
            "--gpus needs lengths of answers and the speed of an engine, and the folder of an asynchronous run tells "
            "durations of groups alone: give that of a synchronous run, or --lengths and --seconds-per-iteration"
        )
    if num_gpus % costs.num_engines:
        raise ConfigError(f"--gpus {num_gpus} must be a multiple of the number of engines, {costs.num_engines}")
    gpus_per_engine = num_gpus // costs.num_engines
    return [
        replace(costs, num_engines=num, step_seconds=costs.step_seconds * num_gpus / (num_gpus - num * gpus_per_engine))
        for num in range(1, costs.num_engines)
    ] or [costs]


# ---- measured runs


def measured(folder: Path) -> Workload:
    """Read lengths and durations of a synchronous run, or durations of an asynchronous one.

    Raises:
        DataError: the folder holds no finished training step with trajectories.
    """
    run = RunFolder(folder)
    rows = run.read_metrics() if folder.is_dir() else []
    if any("async/staleness_mean" in row for row in rows):
        return measured_asynchronous(run)
    metrics = {row["step"]: row for row in rows if "timing/generate" in row}
    files = {file.step: file.path for file in run.trajectory_files() if file.phase == "train"} if metrics else {}
    steps = sorted(metrics.keys() & files.keys())
    if not steps:
        raise DataError(f"{folder} has no finished training step with trajectories (trainer.dump_trajectories=true)")
    cfg = config_of(run)
    lengths = {step: _lengths(step, run.read_trajectories(step, "train")) for step in steps}
    samples = {name: num for by_group in lengths.values() for group in by_group for name, num in group.items()}
    spans = {
        name: end - start
        for record in run.read_timeline()
        for name, _, start, end, _, _ in record["groups"]
        if name in samples
    }
    per_token = seconds_per_token([(samples[name], seconds) for name, seconds in spans.items()])
    groups, equations = [], []
    for step in steps:
        for group in lengths[step]:
            waits = {name: max(0.0, spans.get(name, 0.0) - num * per_token) for name, num in group.items()}
            groups.append([SampleCost(num, waits[name]) for name, num in group.items()])
        tokens = [num for group in lengths[step] for num in group.values()]
        # Without recorded times all of the time counts as the engines'.
        seconds = max(tokens) * per_token if spans else metrics[step]["timing/generate"]
        equations.append((max(tokens), sum(tokens) / cfg.generator.num_inference_engines, seconds))
    per_iteration, per_sequence = fit_iteration(equations)
    used = [metrics[step] for step in steps]
    sync = fmean(row.get("timing/sync_weights", 0.0) for row in used)
    costs = Costs(
        num_engines=cfg.generator.num_inference_engines,
        seconds_per_iteration=per_iteration,
        seconds_per_sequence=per_sequence,
        step_seconds=fmean(map(_whole_seconds, [None, *used], used))
        - fmean(row["timing/generate"] for row in used)
        - sync,
        sync_seconds=sync,
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


def config_of(run: RunFolder) -> "SkyRLConfig":
    import yaml

    from skyrl_train.config import SkyRLConfig

    return SkyRLConfig.from_dict(yaml.safe_load(run.config_path.read_text()))


def _corrections(cfg: "SkyRLConfig") -> Sequence[str]:
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reads_rollout_log_probs or algorithm.off_policy_correction.is_on:
        return ()
    # Only the default loss has a decoupled form.
    return _CORRECTIONS if algorithm.policy_loss_type == type(algorithm)().policy_loss_type else _CORRECTIONS[-1:]


def later_steps(run: RunFolder) -> list[dict[str, Any]]:
    """Return the metrics of the later two thirds of the training steps, in which the queue has filled.

    Raises:
        DataError: there are fewer than two.
    """
    rows = [row for row in run.read_metrics() if "async/staleness_mean" in row]
    rows = rows[len(rows) // 3 :]
    if len(rows) < 2:
        raise DataError(f"{run.path} is an asynchronous run of fewer than 2 steps: too few to measure a step")
    return rows


def measured_asynchronous(run: RunFolder) -> Workload:
    """Read how long the groups of an asynchronous run and the parts of its steps took."""
    rows, cfg = later_steps(run), config_of(run)
    every = cfg.trainer.fully_async.sync_every_steps
    seconds = {
        ticket: end - start
        for record in run.read_timeline()
        for ticket, _, start, end, _, outcome in record["groups"]
        if outcome == "finished"
    }
    mean = fmean(seconds.values())
    groups = [
        [SampleCost(0, seconds.get(ticket, mean))] * cfg.generator.n_samples_per_prompt
        for ticket in range(max(seconds) + 1)
    ]
    sync = fmean(row["timing/sync_weights"] for row in rows)
    waited = fmean(row["timing/wait_for_generation_buffer"] for row in rows)
    whole = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
    costs = Costs(
        num_engines=1,
        seconds_per_iteration=1e-9,
        max_sequences=10**9,
        step_seconds=max(0.0, whole - waited - sync),
        sync_seconds=sync * every,
    )
    return Workload(groups, cfg.trainer.train_batch_size, costs, _corrections(cfg), has_engines=False)


def replayed(folder: Path) -> tuple[float, float]:
    """Return the samples per second that an asynchronous run trained, and those of a simulation in which each group
    takes as long as it did, and so do training and syncs on average. Where they differ, the schedule is modelled
    wrong. Groups older than the bound do not count."""
    run = RunFolder(folder)
    rows, cfg, workload = later_steps(run), config_of(run), measured_asynchronous(run)
    settings, num = cfg.trainer.fully_async, cfg.trainer.train_batch_size
    num_steps = sum(1 for _ in run.read_timeline())
    limits = ScheduleLimits(
        groups_per_step=num,
        max_staleness_steps=settings.max_staleness_steps,
        max_running=settings.max_running(num),
        groups_per_epoch=num * num_steps,
        total_steps=num_steps,
        order=settings.order,
        on_stale=settings.on_stale,
    )
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
    mean, mean_seconds = fmean(num for num, _ in samples), fmean(seconds for _, seconds in samples)
    spread = sum((num - mean) ** 2 for num, _ in samples)
    if not spread:  # equal lengths tell nothing
        return least
    slope = sum((num - mean) * (seconds - mean_seconds) for num, seconds in samples) / spread
    return min(max(slope, 1e-9), least)


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


def table(workload: Workload, baseline: Choice, found: Sequence[Choice]) -> str:
    """Return a line for each choice. Waits: seconds a step for which the trainer waits for groups, and seconds that a
    finished group waits for its step."""
    lines = [
        f"{'order':8} {'stale':10} {'S':>2} {'K':>5} {'engines':>7} {'samples/s':>9} {'gain':>6} {'trainer':>7} "
        f"{'engines':>7} {'wait':>6} {'queue':>6} {'masked':>6} {'anew':>5}  ages 0, 1, …, above S in %"
    ]
    for choice in [baseline, *found]:
        run, limits = choice.run, choice.limits
        bound, num = limits.max_staleness_steps, run.ages.total()
        shares = [f"{100 * run.ages[age] / num:.0f}" for age in range(bound + 1)]
        above = [f"{run.masked_share:.0%}".rstrip("%")] if limits.on_stale == "mask" else []
        on_stale = "" if limits.order == "exact" else limits.on_stale
        gain = run.samples_per_second / baseline.run.samples_per_second
        num_engines, busy = choice.num_engines, f"{run.engine_utilisation:.0%}"
        if not workload.has_engines:
            num_engines = busy = ""
        lines.append(
            f"{limits.order if bound else 'synchron':8} {on_stale:10} {bound:2} {limits.max_running:5} "
            f"{num_engines:7} {run.samples_per_second:9.3g} {gain:5.2f}x {run.trainer_utilisation:7.0%} {busy:>7} "
            f"{run.trainer_wait_seconds:6.3g} {run.queue_seconds:6.3g} {run.masked_share:6.0%} "
            f"{run.restarted_share:5.0%}  {' '.join([*shares, *above])}"
        )
    return "\n".join(lines)


def best(found: Sequence[Choice]) -> Choice:
    """Return the choice of lowest staleness, and fewest groups under way, within 3 % of the highest throughput of those
    that mask few groups."""
    honest = [choice for choice in found if choice.run.masked_share <= _MAX_MASKED]
    most = max(choice.run.samples_per_second for choice in honest)
    good = [choice for choice in honest if choice.run.samples_per_second >= _NEAR * most]
    return min(good, key=lambda choice: (choice.limits.max_staleness_steps, choice.limits.max_running))


def overrides(workload: Workload, choice: Choice, num_gpus: int | None) -> str:
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
        baseline, found = synchronous(workload), choices(workload, options.gpus)
        if options.run is not None and not workload.has_engines:
            print("this run: {:.3g} samples/s; {:.3g} in a simulation of its schedule".format(*replayed(options.run)))
    except (SkyRLError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    chosen = best(found)
    print(workload.describe())
    print(table(workload, baseline, found))
    print("best (lowest S and K within 3 % of the highest throughput; at most 5 % masked), to append to a command:")
    print(overrides(workload, chosen, options.gpus))
    if options.gpus:
        num = chosen.num_engines * options.gpus // workload.costs.num_engines
        print(f"# {num} GPUs for {chosen.num_engines} engines, {options.gpus - num} for training")
    return 0


if __name__ == "__main__":
    sys.exit(main())
