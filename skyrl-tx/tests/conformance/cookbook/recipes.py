"""tinker-cookbook's recipes, unmodified but for server, model and data, and whether they learned.

    python recipes.py --python ENV/bin/python --playground FOLDER --base-url URL [--api-key KEY] [--only NAME…]

Needs nothing but the standard library; the recipes run in the environment of `--python`.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MODEL = "Qwen/Qwen3-8B-Base"
SL = "batch_size=8 learning_rate=3e-3 lora_rank=8 save_every=4 max_steps=16 max_length=512"
RL = "group_size=8 lora_rank=8 max_tokens=12 max_steps=12 save_every=0 loss_fn=importance_sampling"
"""Options of RL recipes with a published loss: their own default, stable_reinforce, is available at the hosted service
only."""
MATH_RL = f"{RL} env=gsm8k groups_per_batch=8 eval_every=0 behavior_if_log_dir_exists=delete"
DPO = "dataset=hhh batch_size=16 learning_rate=1e-3 max_length=256 max_steps=12 behavior_if_log_dir_exists=delete"
DISTILL = "file_path=distilled.jsonl batch_size=8 learning_rate=3e-3 lora_rank=8 max_length=512 num_epochs=3"
REWARD = "env/all/reward/total"


@dataclass(frozen=True)
class Recipe:
    """One command of the cookbook, and what shows that it learned."""

    module: str
    arguments: str
    metric: str
    """Key in its metrics.jsonl."""
    rises: bool = False
    kill_after_rows: int | None = None
    """Killed once it wrote so many rows and started again: it must go on from its checkpoint."""
    seconds: int = 300
    before: tuple[str, str] | None = None
    """A module and its arguments to run first."""


def math_rl(arguments: str, loss: str = "importance_sampling") -> Recipe:
    options = MATH_RL.replace("importance_sampling", loss)
    return Recipe("recipes.math_rl.train", f"{options} {arguments}", REWARD, rises=True)


RECIPES = {
    "sl_loop": Recipe("recipes.sl_loop", SL, "train_mean_nll"),
    "sl_loop, killed and resumed": Recipe("recipes.sl_loop", SL, "train_mean_nll", kill_after_rows=7),
    "rl_loop": Recipe("recipes.rl_loop", f"{RL} batch_size=8 learning_rate=2e-3", "reward/total", rises=True),
    "rl, synchronous": math_rl("learning_rate=2e-3"),
    "rl, ppo": math_rl("learning_rate=1e-3 num_substeps=2", loss="ppo"),
    "rl, asynchronous": math_rl("learning_rate=2e-3 max_steps_off_policy=2"),
    "rl, streaming": math_rl(
        "learning_rate=2e-3 stream_minibatch_config.groups_per_batch=8 stream_minibatch_config.num_minibatches=2"
    ),
    "dpo": Recipe("recipes.preference.dpo.train", DPO, "dpo_loss"),
    "prompt distillation": Recipe(
        "recipes.prompt_distillation.train",
        f"{DISTILL} behavior_if_log_dir_exists=delete",
        "train_mean_nll",
        before=("recipes.prompt_distillation.create_data", "output_file=distilled.jsonl"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    name: str
    learned: bool
    values: list[float]
    seconds: float
    trouble: str = ""


class Kitchen:
    """Environment in which recipes are run."""

    def __init__(self, python: Path, playground: Path, base_url: str, api_key: str):
        self.python, self.playground, self.base_url = python, playground, base_url
        self.environment = os.environ | {
            "TINKER_BASE_URL": base_url,
            "TINKER_API_KEY": api_key,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(playground / ".datasets"),
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }

    def start(self, module: str, arguments: Iterable[str], log: Path) -> subprocess.Popen[bytes]:
        command = [str(self.python), "-m", f"tinker_cookbook.{module}", *arguments]
        with log.open("ab") as out:
            return subprocess.Popen(
                command, cwd=self.playground, env=self.environment, stdout=out, stderr=subprocess.STDOUT
            )

    def cook(self, name: str, recipe: Recipe) -> Outcome:
        start = time.monotonic()
        folder = self.playground / "runs" / name.replace(", ", "-").replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        metrics, log = folder / "run" / "metrics.jsonl", folder / "log.txt"
        arguments = [*recipe.arguments.split(), f"model_name={MODEL}", f"log_path={folder / 'run'}"]
        arguments.append(f"base_url={self.base_url}")
        try:
            if recipe.before:
                (self.playground / "distilled.jsonl").unlink(missing_ok=True)
                finish(self.start(recipe.before[0], recipe.before[1].split(), log), recipe.seconds, log)
            process = self.start(recipe.module, arguments, log)
            if recipe.kill_after_rows is not None:
                until_rows(metrics, recipe.kill_after_rows, process, recipe.seconds)
                process.send_signal(signal.SIGKILL)
                process.wait()
                process = self.start(recipe.module, arguments, log)
            finish(process, recipe.seconds, log)
        except RuntimeError as error:
            return Outcome(name, False, numbers(metrics, recipe.metric), time.monotonic() - start, str(error))
        values = numbers(metrics, recipe.metric)
        return Outcome(name, learned(values, recipe.rises), values, time.monotonic() - start)


def finish(process: subprocess.Popen[bytes], seconds: int, log: Path) -> None:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise RuntimeError(f"not done after {seconds} s:\n{tail(log)}") from None
    if status:
        raise RuntimeError(f"ended with {status}:\n{tail(log)}")


def until_rows(metrics: Path, rows: int, process: subprocess.Popen[bytes], seconds: int) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= rows:
            return
        time.sleep(0.05)
    raise RuntimeError(f"it did not write {rows} rows of metrics")


def numbers(metrics: Path, key: str) -> list[float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [row[key] for row in rows if key in row]


def learned(values: list[float], rises: bool) -> bool:
    """Return True if the last quarter is better than the first by at least a tenth of it."""
    if len(values) < 4:
        return False
    part = max(1, len(values) // 4)
    first, last = statistics.mean(values[:part]), statistics.mean(values[-part:])
    return last > first + 0.1 * abs(first) if rises else last < first - 0.1 * abs(first)


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:] if log.exists() else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--playground", type=Path, required=True)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--api-key", default="tml-cookbook")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    kitchen = Kitchen(options.python.absolute(), options.playground.resolve(), options.base_url, options.api_key)
    failed = 0
    for name, recipe in RECIPES.items():
        if options.only and not any(word in name for word in options.only):
            continue
        outcome = kitchen.cook(name, recipe)
        failed += not outcome.learned
        values = " ".join(f"{value:.3g}" for value in outcome.values)
        print(f"{'ok' if outcome.learned else 'FAIL':<5}{name:<30}{outcome.seconds:5.0f} s  {recipe.metric}: {values}")
        if outcome.trouble:
            print(outcome.trouble)
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
