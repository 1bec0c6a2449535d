"""Shared parts of the recipes' miniatures: supervised warm-up, training runs by the recipe's own script, differences
over seeds with intervals, tables and pictures. Knows no recipe.

A miniature is `examples/recipes/NAME/miniature.py`: it makes a tiny model and data, and trains each arm (a kind of run)
once for each seed by the script of a row of the recipe, with small sizes instead of the published ones.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: one thread a process

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.utils.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]

Messages = list[dict[str, str]]
Metrics = list[dict[str, Any]]
"""Metrics of each step, in order: the content of a run's `metrics.jsonl`."""

SIZES = [
    "trainer.placement.launcher=inline",
    "trainer.bf16=false",
    "trainer.gradient_checkpointing=false",
    "trainer.ckpt_interval=-1",
    "trainer.hf_save_interval=-1",
    "trainer.dump_data_batch=false",
    "trainer.resume_mode=none",
    "trainer.epochs=1000",
    "trainer.curve_bands=null",
    "generator.model_dtype=float32",
    "generator.enforce_eager=null",
]
"""Settings of every miniature: one process, float32, no checkpoints, `trainer.max_training_steps` instead of epochs,
and no comparison with the published run's curves."""

VARIABLES = {"DEVICE": "cpu", "INFERENCE_BACKEND": "native", "NUM_GPUS": "1", "NUM_NODES": "1", "TENSOR_PARALLEL": "1"}
"""Environment of the recipe's script: no GPU, one worker, one engine."""

IGNORED = -100
RAMP_STEPS = 20


# ---- the model


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, learned: Callable[[int], bool] = lambda index: True
) -> tuple[list[int], list[int]]:
    """Return token ids of a conversation as the chat template writes it, and the labels of the warm-up.

    Args:
        learned: of a message's index, whether an assistant's message is learned; others of it are context.

    Returns:
        ids [T], labels [T]: the id where the assistant wrote it, its end token included, and `IGNORED` elsewhere.
    """
    ids: list[int] = []
    labels: list[int] = []
    end = str(tokenizer.eos_token)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before: Any = tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False)
        written = tokenizer.encode(message["content"] + end, add_special_tokens=False)
        labels += [IGNORED] * (len(before) - len(ids)) + (written if learned(index) else [IGNORED] * len(written))
        ids = [*before, *written]
    return ids, labels


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrate: Callable[[random.Random], Any],
    *,
    encode: Callable[[PreTrainedTokenizerBase, Any], tuple[list[int], list[int]]] = encode_conversation,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> float:
    """Train the model in place on demonstrations sampled per batch.

    Args:
        encode: tokenizer and demonstration -> ids [T] and labels [T].

    Returns:
        The loss of the last step.
    """
    draw = random.Random(seed)
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / RAMP_STEPS, 1) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    model.train()
    loss = torch.tensor(float("nan"))
    for step in range(steps):
        rows = [encode(tokenizer, demonstrate(draw)) for _ in range(batch_size)]
        longest = max(len(ids) for ids, _ in rows)
        # Padding is on the right and attention is causal, so no attention mask is needed.
        input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [IGNORED] * (longest - len(labels)) for _, labels in rows])
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"warm-up step {step:4d}  loss {loss.item():.3f}", flush=True)
    return loss.item()


# ---- runs


def argument_parser(documentation: str | None, recipe: str, steps: int, warm_up_steps: int) -> argparse.ArgumentParser:
    """Make a parser of the arguments of every miniature."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warm_up_steps", type=int, default=warm_up_steps)
    output = REPOSITORY / "runs" / f"miniature-{recipe}"
    parser.add_argument("--output", type=Path, default=output, help="folder of the runs and of the picture curves.png")
    return parser


def train(script: Path, run_dir: Path, settings: Sequence[str], variables: Mapping[str, str], steps: int) -> Metrics:
    """Run the script of a recipe's row in a separate process, unless `run_dir` holds the complete run.

    Args:
        script: below examples/recipes; its settings are the published ones.
        settings: overrides at the end of its command line; `SIZES` come before them.
        variables: environment variables in addition to `VARIABLES`: MODEL, DATA_DIR …
        steps: number of training steps.

    Returns:
        The metrics of its steps.

    Raises:
        RuntimeError: the run failed; the message includes the end of its log.
    """
    own = [*SIZES, *settings, f"trainer.max_training_steps={steps}", f"trainer.run_dir={run_dir}"]
    given = run_dir / "miniature.json"
    rows = RunFolder(run_dir).read_metrics()
    if rows and rows[-1]["step"] >= steps and given.exists() and json.loads(given.read_text()) == own:
        return rows
    run_dir.mkdir(parents=True, exist_ok=True)
    RunFolder(run_dir).metrics_path.unlink(missing_ok=True)
    given.write_text(json.dumps(own))
    log = run_dir / "miniature.log"
    began = time.monotonic()
    print(f"{run_dir}: training {steps} steps; log: {log}", flush=True)
    environment = os.environ | VARIABLES | {"PYTHON": sys.executable, **variables}
    with log.open("wb") as output:
        done = subprocess.run(
            ["bash", str(script), *own], env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise RuntimeError(f"{script} ended with {done.returncode}; {log} ends with\n{log.read_text()[-3000:]}")
    print(f"{run_dir}: {steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    return RunFolder(run_dir).read_metrics()


def values_of(rows: Metrics, metric: str) -> dict[int, float]:
    """Return a metric by step, of the steps that have it."""
    return {row["step"]: row[metric] for row in rows if row.get(metric) is not None}


def first_value(rows: Metrics, metric: str) -> float:
    values = values_of(rows, metric)
    return values[min(values)]


def last_value(rows: Metrics, metric: str) -> float:
    values = values_of(rows, metric)
    return values[max(values)]


def mean_value(rows: Metrics, metric: str, last: int | None = None) -> float:
    """Return the mean of a metric over the run, or over the last steps of those that have it."""
    values = list(values_of(rows, metric).values())
    return fmean(values[-last:] if last else values)


# ---- comparisons

_T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantile 0.975 of Student's t, by degrees of freedom."""


@dataclass(frozen=True)
class Difference:
    """Paired difference of two arms, or of the end and the start of one: a value for each seed, and their interval."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval of the mean (Student's t over seeds); infinite for one seed."""
        n = len(self.values)
        return _T_975[n - 1] * stdev(self.values) / math.sqrt(n) if n > 1 else math.inf

    def shows(self, direction: int) -> bool:
        """Tell if every seed has the sign `direction` (1 or -1) and the interval excludes 0."""
        return all(value * direction > 0 for value in self.values) and abs(self.mean) > self.margin

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.mean:+.3f} (one seed: no interval)"
        return f"{self.mean:+.3f} [{self.mean - self.margin:+.3f}, {self.mean + self.margin:+.3f}]"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def draw_curves(
    path: Path, panels: Mapping[str, str], arms: Mapping[str, Sequence[Metrics]], xlabel: str = "step"
) -> Path:
    """Draw metrics over `step`, a panel each: a thin line for each seed, a thick one for their mean.

    Args:
        path: PNG file to write.
        panels: name of a metric -> title of its panel.
        arms: name of an arm -> the metrics of its run of each seed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(panels), 3.4), dpi=140, layout="constrained")
    colors = ["#2457c5", "#c2571a", "#3a8a3a", "#7a4fb5"]
    for axes, (metric, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for color, (arm, runs) in zip(colors, arms.items(), strict=False):
            curves = [values_of(rows, metric) for rows in runs]
            for curve in curves:
                axes.plot(list(curve), list(curve.values()), color=color, alpha=0.3, linewidth=0.9)
            steps = sorted(set.intersection(*map(set, curves)))
            means = [fmean(curve[step] for curve in curves) for step in steps]
            axes.plot(steps, means, color=color, linewidth=2.2, label=arm)
        axes.set(title=title, xlabel=xlabel)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path
