"""Measure the speed of asynchronous training where few answers take long, and compare it with the simulator's.

    python benchmarks/asynchronous.py [--workload lognormal] [--seconds 0.25] [--schedules finished/mask/2 …]

A tiny model answers in an environment that takes a time of `--workload` to grade. The same prompts are trained
synchronously and asynchronously, in turn, with one engine each and in one process (`launcher=inline`). The command
`simulate` predicts the gain of each schedule from the folder of the synchronous run, as for any run. `replay` is a
simulation with the asynchronous run's own durations. Only samples of groups within the
bound on staleness count. Prints a markdown table.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: trainer and engine have a core each

from skyrl_gym import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_inspect.simulate.__main__ import main as simulate
from skyrl_inspect.simulate.workloads import replay
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.validation import validate_cfg
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

GROUPS, SAMPLES, TOKENS = 4, 4, 8
PROMPTS = 256  # an epoch is longer than the run, as the simulated ones
SECONDS = 0.25
SCHEDULES = ["exact/regenerate/1", "exact/regenerate/2", "finished/regenerate/2", "finished/mask/2"]
SCHEDULES += ["exact/regenerate/4", "finished/regenerate/4"]


class Uneven(BaseTextEnv):
    """Grades after a time that depends on the workload, the prompt and the number of the answer."""

    workload: ClassVar[str] = "outliers"
    num_begun: ClassVar[Counter[int]] = Counter()
    """Number of answers to each prompt."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def init(self, prompt: Any) -> Any:
        number = int(prompt[-1]["content"].split()[-1])
        self.seconds = SECONDS * WORKLOADS[self.workload](number, self.num_begun[number])
        self.num_begun[number] += 1
        return super().init(prompt)

    async def step(self, action: str) -> BaseTextEnvStepOutput:
        await asyncio.sleep(self.seconds)
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def draw(prompt: int, answer: int) -> random.Random:
    return random.Random(f"{prompt}/{answer}")


WORKLOADS: dict[str, Callable[[int, int], float]] = {
    # One of the answers to every fourth prompt takes ten times as long.
    "outliers": lambda prompt, answer: 10 if prompt % 4 == 0 and answer % SAMPLES == 0 else 1,
    "lognormal": lambda prompt, answer: draw(prompt, answer).lognormvariate(0, 1),
    # All answers to a prompt take as long: some prompts are slow.
    "slow prompts": lambda prompt, answer: 6 if draw(prompt, 0).random() < 0.2 else 1,
    "even": lambda prompt, answer: draw(prompt, answer).uniform(1, 3),
}
"""Multiples of `SECONDS`, for the number of a prompt and of an answer to it."""


def settings(folder: Path, name: str, steps: int, trainer: dict[str, Any]) -> SkyRLConfig:
    return validate_cfg(
        {
            "data": {"train_data": [str(folder / "prompts.jsonl")], "val_data": []},
            "environment": {"env_class": "uneven"},
            "trainer": {
                "run_dir": str(folder / name),
                "policy": {"model": {"path": str(folder / "model")}, "optimizer_config": {"lr": 1e-4}},
                "placement": {"device": "cpu", "launcher": "inline", "colocate_all": False},
                "algorithm": {"use_kl_loss": False, "off_policy_correction": {"tis_ratio_type": "token"}},
                "bf16": False,
                "train_batch_size": GROUPS,
                "policy_mini_batch_size": GROUPS,
                "micro_train_batch_size_per_gpu": GROUPS * SAMPLES,
                "max_training_steps": steps,
                "epochs": steps,
                "ckpt_interval": -1,
                "eval_interval": -1,
                **trainer,
            },
            "generator": {
                "model_dtype": "float32",
                "n_samples_per_prompt": SAMPLES,
                "sampling_params": {"max_generate_length": TOKENS},
            },
        }
    )


def train(cfg: SkyRLConfig) -> list[dict[str, Any]]:
    """Train; return the metrics of the later two thirds of the steps, when the pipeline is full."""
    BasePPOExp(cfg).run()
    rows = RunFolder(cfg.trainer.run_dir).read_metrics()
    return rows[len(rows) // 3 :]


def samples_per_second(rows: list[dict[str, Any]]) -> float:
    seconds = rows[-1]["time"] - rows[0]["time"]
    return (len(rows) - 1) * GROUPS * SAMPLES / seconds


def predicted(folder: Path, schedule: str) -> float:
    """Return the gain that the command `simulate` prints for a schedule, from the folder of the synchronous run."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert simulate([str(folder)]) == 0
    selection, on_stale, staleness = schedule.split("/")
    name = selection if selection == "exact" else f"{selection} {on_stale}"
    gain = re.search(rf"^{name} +{staleness} .*? ([0-9.]+)x ", printed.getvalue(), re.MULTILINE)
    assert gain is not None, printed.getvalue()
    return float(gain[1])


def main() -> None:
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that the environment takes, mostly")
    parser.add_argument("--workload", choices=WORKLOADS, default="outliers")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="ORDER/ON_STALE/S")
    options = parser.parse_args()
    SECONDS, Uneven.workload = options.seconds, options.workload
    register(id="uneven", entry_point=Uneven)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = build_character_tokenizer()
        tokenizer.save_pretrained(folder / "model")
        model = build_tiny_qwen3(hidden_size=32, vocab_size=len(tokenizer), max_position_embeddings=256)
        model.save_pretrained(folder / "model")
        contents = [[{"role": "user", "content": f"write {i}"}] for i in range(PROMPTS)]
        prompts = [{"prompt": content, "data_source": "toy"} for content in contents]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        load = os.getloadavg()[0]
        synchronous = settings(folder, "synchronous", options.steps, {})
        base = samples_per_second(train(synchronous))
        lines = [f"| synchronous | {base:.2f} | | 1.00x | 1.00x | 0 | 0 |"]
        for number, text in enumerate(options.schedules):
            selection, on_stale, staleness = text.split("/")
            schedule = {"order": selection, "on_stale": on_stale, "max_staleness_steps": int(staleness)}
            Uneven.num_begun.clear()
            cfg = settings(folder, f"run_{number}", options.steps, {"fully_async": {"enabled": True, **schedule}})
            rows = train(cfg)
            speed, replayed = replay(Path(cfg.trainer.run_dir))
            gain = predicted(Path(synchronous.trainer.run_dir), text)
            age, stale = (
                fmean(row[f"async/{name}"] for row in rows) for name in ("staleness_mean", "stale_token_share")
            )
            lines.append(
                f"| S = {staleness}, `{selection}`, `{on_stale}` | {speed:.2f} | {replayed:.2f} | {speed / base:.2f}x "
                f"| {gain:.2f}x | {age:.1f} | {stale:.0%} |"
            )
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}, torch {version('torch')}"
    print(
        f"\n{options.workload}: {GROUPS} prompts x {SAMPLES} samples, {options.steps} steps, multiples of {SECONDS:g} "
        "s to grade.\n"
        f"{machine}, load {load:.1f} before and {os.getloadavg()[0]:.1f} after.\n\n"
        "| | samples/s | replayed | measured gain | predicted gain | mean age | tokens too old |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
