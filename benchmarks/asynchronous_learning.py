"""Comparison of asynchronous (S = 4) and synchronous training: reward of the policy, with and without correction.

    python benchmarks/asynchronous_learning.py [--tasks arithmetic calculator] [--seeds 0 1 2] [--steps 40]
        [--runs synchronous corrected uncorrected] [--output FOLDER]

Trains the quickstart's models (`examples/quickstart`, `launcher=inline`) once for each task, seed and kind of run:

    synchronous    trainer and engine take turns
    corrected      S = 4 (`--staleness`), truncated importance sampling by token
    masked         the same, and no loss on tokens whose probability changed by more than a factor of 2
    decoupled      S = 4, `policy_loss_type=decoupled_ppo`
    rollout_is     S = 4, `policy_loss_type=rollout_is`, no loss on tokens whose ratio is outside of 0.5 to 5
    dppo           S = 4, `policy_loss_type=dppo`
    uncorrected    S = 4 without it. A run refuses that; the switch is here alone, after the settings were checked

Seeds are of warm-up, data and sampling. A run whose metrics are complete in `--output` is not repeated. Prints the
evaluation reward of every run at every tenth step and a summary, as markdown tables.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "quickstart"))

from run import prepare, script_settings

from skyrl_train.config import SkyRLConfig, compose_config
from skyrl_train.config.validation import validate_cfg
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder

_CORRECTION = "trainer.algorithm.off_policy_correction"
_TRUNCATED = f"{_CORRECTION}.tis_ratio_type=token"
KINDS = {
    "synchronous": [],
    "corrected": [_TRUNCATED],
    "masked": [
        _TRUNCATED,
        f"{_CORRECTION}.token_mask_is_threshold_low=0.5",
        f"{_CORRECTION}.token_mask_is_threshold_high=2",
    ],
    "decoupled": ["trainer.algorithm.policy_loss_type=decoupled_ppo"],
    "rollout_is": [
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.algorithm.eps_clip_low=0.5",
        "trainer.algorithm.eps_clip_high=4",
    ],
    "dppo": ["trainer.algorithm.policy_loss_type=dppo"],
    "uncorrected": [_TRUNCATED],  # for the checks; `Uncorrected` takes it away
}
INTERVAL = 10
"""Steps between evaluations."""


class Uncorrected(BasePPOExp):
    """A stale run without correction. `validate` has seen it with one."""

    def __init__(self, cfg: SkyRLConfig):
        super().__init__(cfg)
        self.cfg.trainer.algorithm.off_policy_correction.tis_ratio_type = None


def train(folder: Path, task: str, kind: str, seed: int, steps: int, staleness: int) -> list[dict[str, Any]]:
    """Train one run, unless its metrics are there. Returns: the metrics of its steps."""
    run_dir = folder / (kind if kind == "synchronous" else f"{kind}_{staleness}")
    rows = RunFolder(run_dir).read_metrics()
    if rows and rows[-1]["step"] >= steps:
        return rows
    prepare(folder, task, seed)
    overrides = [
        f"trainer.seed={seed}",
        f"trainer.max_training_steps={steps}",
        f"trainer.eval_interval={INTERVAL}",
        "trainer.ckpt_interval=-1",
        "trainer.hf_save_interval=-1",
        "trainer.dump_trajectories=false",
        "trainer.dump_eval_results=false",
        "trainer.resume_mode=none",
        "trainer.placement.launcher=inline",
        "trainer.placement.policy_num_gpus_per_node=1",
        "trainer.placement.colocate_all=false",
    ]
    if kind != "synchronous":
        overrides += ["trainer.fully_async.enabled=true", f"trainer.fully_async.max_staleness_steps={staleness}"]
    overrides += KINDS[kind]
    RunFolder(run_dir).metrics_path.unlink(missing_ok=True)
    cfg = validate_cfg(compose_config(script_settings(folder, task, [f"trainer.run_dir={run_dir}", *overrides])))
    (Uncorrected if kind == "uncorrected" else BasePPOExp)(cfg).run()
    return RunFolder(run_dir).read_metrics()


def evaluations(rows: list[dict[str, Any]]) -> dict[int, float]:
    return {row["step"]: row["eval/all/avg_score"] for row in rows if row.get("eval/all/avg_score") is not None}


def late_reward(rows: list[dict[str, Any]]) -> float:
    """Mean training reward of the last steps: of many more samples than an evaluation has."""
    rewards = [row["reward/avg_raw_reward"] for row in rows if "reward/avg_raw_reward" in row]
    return fmean(rewards[-INTERVAL:])


def table_of_runs(found: dict[tuple[str, str, int], list[dict[str, Any]]]) -> list[str]:
    steps = sorted({step for rows in found.values() for step in evaluations(rows)})
    heads = [f"step {step}" for step in steps]
    lines = [f"| task | run | seed | {' | '.join(heads)} | late training reward | mean age |"]
    lines.append("|---|---|---:|" + "---:|" * (len(heads) + 2))
    for (task, kind, seed), rows in found.items():
        scores = evaluations(rows)
        cells = " | ".join(f"{scores[step]:.3f}" if step in scores else "" for step in steps)
        age = fmean(row.get("async/staleness_mean", 0.0) for row in rows if row["step"] > rows[-1]["step"] / 2)
        lines.append(f"| {task} | {kind} | {seed} | {cells} | {late_reward(rows):.3f} | {age:.1f} |")
    return lines


def summary(found: dict[tuple[str, str, int], list[dict[str, Any]]]) -> list[str]:
    lines = ["| task | run | last evaluation, mean ± s.d. of seeds | late training reward, mean ± s.d. |"]
    lines.append("|---|---|---:|---:|")
    for task, kind in dict.fromkeys((task, kind) for task, kind, _ in found):
        runs = [rows for (own_task, own_kind, _), rows in found.items() if (own_task, own_kind) == (task, kind)]
        last = [evaluations(rows)[max(evaluations(rows))] for rows in runs]
        lines.append(f"| {task} | {kind} | {spread(last)} | {spread([late_reward(rows) for rows in runs])} |")
    return lines


def spread(values: list[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["arithmetic", "calculator"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", choices=list(KINDS), default=["synchronous", "corrected", "uncorrected"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--output", type=Path, help="where runs are kept; default: nowhere")
    options = parser.parse_args()
    started, found = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as temporary:
        output = (options.output or Path(temporary)).resolve()
        for seed in options.seeds:
            for task in options.tasks:
                for kind in options.runs:
                    folder = output / f"{task}_{seed}"
                    rows = train(folder, task, kind, seed, options.steps, options.staleness)
                    found[task, kind, seed] = rows
                    print(f"{time.monotonic() - started:.0f} s: {task} {kind} {seed} {evaluations(rows)}", flush=True)
    print("\n".join(["", *table_of_runs(dict(sorted(found.items()))), "", *summary(dict(sorted(found.items())))]))


if __name__ == "__main__":
    main()
