"""`python -m skyrl_train.entrypoints.simulate RUN`: predict what asynchronous training gains, and with which settings.

Takes lengths and durations of samples and durations of phases from the folder of a synchronous run, the durations of
groups from an asynchronous one, or both from options; prints throughput against synchronous training, utilisation of
both sides, waits and ages for several bounds on staleness and orders of training. Only groups within the bound count as
throughput.

    python -m skyrl_train.entrypoints.simulate runs/my_run
    python -m skyrl_train.entrypoints.simulate --lengths 1000:15,10000:1 --groups 32 --samples 8 --engines 4 \\
        --seconds-per-iteration 0.02 --seconds-per-sequence 0.0002 --step-seconds 30 --sync-seconds 3
    … --gpus 16        # also how many of them should be engines; --engines and --step-seconds are of all of them

With `--gpus`, synchronous training uses all of them for both phases in turn, asynchronous training splits them.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from skyrl_inspect.simulate.comparison import Choice, choose, simulate_choices, simulate_synchronous
from skyrl_inspect.simulate.simulator import Costs, SampleCost
from skyrl_inspect.simulate.workloads import Workload, read_workload, replay
from skyrl_train.errors import ConfigError, SkyRLError


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


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skyrl_train.entrypoints.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="?", help="a run folder; the options below are only for use without one"
    )
    for name, kind, default, text in (
        ("gpus", int, None, "GPUs to split between engines and training"),
        ("lengths", str, None, "histogram of tokens per sample: tokens:weight,tokens:weight,…"),
        ("groups", int, None, "prompts per training step"),
        ("samples", int, 1, "samples per prompt"),
        ("engines", int, 1, "number of engines"),
        ("seconds-per-iteration", float, None, "seconds of one decoding iteration"),
        ("seconds-per-sequence", float, 0.0, "seconds that each sequence adds to it"),
        ("max-sequences", int, 1024, "sequences that an engine decodes concurrently"),
        ("wait-seconds", float, 0.0, "environment seconds per sample"),
        ("step-seconds", float, None, "seconds of a training step without generation and weight sync"),
        ("sync-seconds", float, 0.0, "seconds for which a weight sync pauses the engines"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns: the exit status."""
    options = _build_parser().parse_args(arguments)
    try:
        workload = _build_workload(options) if options.run is None else read_workload(options.run)
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


def _build_workload(options: argparse.Namespace) -> Workload:
    """Build the workload that options describe. Raises ConfigError if one is missing or wrong."""
    for name in ("lengths", "groups", "seconds_per_iteration", "step_seconds"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is required without a run folder")
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


if __name__ == "__main__":
    sys.exit(main())
