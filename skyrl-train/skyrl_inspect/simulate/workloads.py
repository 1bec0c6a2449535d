"""Workloads to simulate: measured in a run folder."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, mode
from typing import Any

import numpy as np

from skyrl_inspect.simulate.simulator import Costs, SampleCost, Simulation
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import DataError
from skyrl_train.rollouts.schedule import ScheduleLimits
from skyrl_train.utils.run_folder import RunFolder

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
    files = {file.step for file in run.list_trajectory_files() if file.phase == "train"} if metrics else set()
    steps = sorted(metrics.keys() & files)
    if not steps:
        raise DataError(f"{folder} has no finished training step with trajectories (trainer.dump_trajectories=true)")
    cfg = _read_config(run)
    num_engines = cfg.generator.num_inference_engines
    lengths = {step: _count_lengths(step, run.read_trajectories(step, "train")) for step in steps}
    samples = {name: num for by_group in lengths.values() for group in by_group for name, num in group.items()}
    records = [group for record in run.read_timeline() for group in record["groups"]]
    spans = {name: end - start for name, _, start, end, _, _ in records if name in samples}
    per_token = fit_seconds_per_token([(samples[name], seconds) for name, seconds in spans.items()])
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
        step_seconds=fmean(map(_measure_step_seconds, [None, *used], used)) - generating - sync,
        sync_seconds=sync,
        repeatability=compute_between_fraction(
            [[each.num_tokens * per_token + each.wait_seconds for each in group] for group in groups]
        ),
    )
    return Workload(groups, cfg.trainer.train_batch_size, costs, _list_corrections(cfg))


def _measure_step_seconds(before: dict[str, Any] | None, row: dict[str, Any]) -> float:
    """Return the seconds from one row of metrics to the next, with the logging between two steps, less evaluations,
    exports and checkpoints."""
    step = row["timing/step"]
    if before is None or before["step"] != row["step"] - 1:
        return step
    others = sum(row.get(f"timing/{name}", 0.0) for name in ("eval", "save_checkpoints", "save_hf_model"))
    return max(step, row["time"] - before["time"] - others)


def _read_config(run: RunFolder) -> SkyRLConfig:
    import yaml

    from skyrl_train.config import SkyRLConfig

    return SkyRLConfig.from_dict(yaml.safe_load(run.config_path.read_text()))


def _list_corrections(cfg: SkyRLConfig) -> Sequence[str]:
    algorithm = cfg.trainer.algorithm
    if algorithm.loss_reads_rollout_log_probs or algorithm.off_policy_correction.is_on:
        return ()
    # Only the default loss has a decoupled form.
    return _CORRECTIONS if algorithm.policy_loss_type == type(algorithm)().policy_loss_type else _CORRECTIONS[-1:]


def _read_later_steps(run: RunFolder) -> list[dict[str, Any]]:
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
    rows, cfg = _read_later_steps(run), _read_config(run)
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
    return Workload(groups, cfg.trainer.train_batch_size, costs, _list_corrections(cfg), has_engines=False)


def replay(folder: Path) -> tuple[float, float]:
    """Return the samples per second that an asynchronous run trained, and of a simulation in which each group takes as
    long as it did, and so do training and syncs on average. Where they differ, the model of the schedule is wrong.
    Groups older than the bound do not count."""
    run = RunFolder(folder)
    rows, cfg, workload = _read_later_steps(run), _read_config(run), _read_asynchronous(run)
    settings, num = cfg.trainer.fully_async, cfg.trainer.train_batch_size
    num_steps = sum(1 for _ in run.read_timeline())
    limits = ScheduleLimits(
        groups_per_step=num, max_staleness_steps=settings.max_staleness_steps,
        max_running=settings.get_max_running(num), groups_per_epoch=num * num_steps, total_steps=num_steps,
        order=settings.order, on_stale=settings.on_stale,
    )  # fmt: skip
    every = settings.sync_every_steps
    simulated = Simulation(limits, workload.groups, workload.costs, sync_every_steps=every, in_order=True).simulate()
    trained = sum(num - row["async/staleness_violation_count"] for row in rows[1:]) * len(workload.groups[0])
    return trained / (rows[-1]["time"] - rows[0]["time"]), simulated.samples_per_second


def _count_lengths(step: int, rows: list[dict]) -> list[dict[str, int]]:
    """Return the number of generated tokens of each sample by its name in the timeline, for each group."""
    groups: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        groups[row["uid"]][f"{step}:{row['uid']}_{row['sample']}"] += max(1, sum(row["tokens"]["loss_mask"]))
    return [dict(samples) for samples in groups.values()]


def fit_seconds_per_token(samples: Sequence[tuple[int, float]]) -> float:
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


def compute_between_fraction(groups: Sequence[Sequence[float]]) -> float:
    """Return the fraction of variance between groups, from 0 to 1: intraclass correlation of a one-way analysis of
    variance, over groups of the most common size. 1 if it cannot be computed.
    """
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
