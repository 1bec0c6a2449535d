"""Measure the speed of asynchronous training where few answers take long, and compare it with the simulator's.

    python benchmarks/asynchronous.py [--steps 30] [--seconds 0.25] [--schedules finished/mask/2 exact/mask/2 …]

A tiny model answers in an environment that takes `--seconds` to grade, and ten times as long for one answer in 16: one
of the four to every fourth prompt, at each try. The same prompts are trained in the same order synchronously and
asynchronously, in turn, with one engine each and in one process (`launcher=inline`). The simulator is given what the
synchronous run measured: the seconds of a training step and of a weight sync, of an engine's iteration, and the order
of the prompts. `replayed` is a simulation with the asynchronous run's own durations. Only samples of groups within the
bound on staleness count. Prints a markdown table.
"""

import argparse
import asyncio
import json
import os
import platform
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: trainer and engine have a core each

from skyrl_gym import register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.validation import validate_cfg
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.entrypoints.simulate import replayed
from skyrl_train.rollouts.schedule import ScheduleLimits
from skyrl_train.rollouts.simulation import Costs, SampleCost, Simulation
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_models import character_tokenizer, tiny_qwen3

GROUPS, SAMPLES, TOKENS = 4, 4, 8
PROMPTS, ONE_PROMPT_IN, TIMES = 64, 4, 10
SECONDS = 0.25
SCHEDULES = ["exact/regenerate/1", "exact/regenerate/2", "finished/regenerate/2", "finished/mask/2"]
SCHEDULES += ["exact/regenerate/4", "finished/regenerate/4"]


class Uneven(BaseTextEnv):
    """Grades after `SECONDS`, or ten times as long for the first of the answers to every fourth prompt."""

    num_begun: ClassVar[Counter[int]] = Counter()
    """Number of answers to each prompt."""

    order: ClassVar[list[int]] = []
    """Prompts, in the order of the first answers of their groups."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def init(self, prompt: Any) -> Any:
        number = int(prompt[-1]["content"].split()[-1])
        is_first = self.num_begun[number] % SAMPLES == 0
        self.is_slow = is_first and is_uneven(number)
        self.num_begun[number] += 1
        if is_first:
            self.order.append(number)
        return super().init(prompt)

    async def step(self, action: str) -> BaseTextEnvStepOutput:
        await asyncio.sleep(SECONDS * (TIMES if self.is_slow else 1))
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


def is_uneven(prompt: int) -> bool:
    """Return whether one of the answers to a prompt is slow."""
    return prompt % ONE_PROMPT_IN == 0


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
                "dump_trajectories": False,
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


def measured_costs(rows: list[dict[str, Any]]) -> Costs:
    """Return the costs that the synchronous run showed."""
    sync = fmean(row["timing/sync_weights"] for row in rows)
    generate = min(row["timing/generate"] for row in rows)
    return Costs(
        num_engines=1,
        seconds_per_iteration=max(1e-4, generate - SECONDS) / TOKENS,
        step_seconds=fmean(row["timing/step"] - row["timing/generate"] for row in rows) - sync,
        sync_seconds=sync,
    )


def predicted(costs: Costs, order: list[int], schedule: dict[str, Any]) -> float:
    """Return the samples per second of a simulated run over the prompts in this order."""
    groups = [
        [SampleCost(TOKENS, SECONDS * (TIMES if i == 0 and is_uneven(prompt) else 1)) for i in range(SAMPLES)]
        for prompt in order
    ]
    limits = ScheduleLimits(
        groups_per_step=GROUPS,
        max_running=GROUPS * (schedule["max_staleness_steps"] + 1),
        groups_per_epoch=PROMPTS,
        total_steps=len(order) // GROUPS,
        **schedule,
    )
    return Simulation(limits, groups, costs, in_order=True).simulate().samples_per_second


def main() -> None:
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that the environment takes, mostly")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="ORDER/ON_STALE/S")
    options = parser.parse_args()
    SECONDS = options.seconds
    register(id="uneven", entry_point=Uneven)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = character_tokenizer()
        tokenizer.save_pretrained(folder / "model")
        model = tiny_qwen3(hidden_size=32, vocab_size=len(tokenizer), max_position_embeddings=256)
        model.save_pretrained(folder / "model")
        contents = [[{"role": "user", "content": f"write {i}"}] for i in range(PROMPTS)]
        prompts = [{"prompt": content, "data_source": "toy"} for content in contents]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        load = os.getloadavg()[0]
        synchronous = train(settings(folder, "synchronous", options.steps, {}))
        base, costs = samples_per_second(synchronous), measured_costs(synchronous)
        order = Uneven.order[: options.steps * GROUPS]
        simulated_base = predicted(costs, order, {"max_staleness_steps": 0, "order": "exact"})
        lines = [f"| synchronous | {base:.2f} | | 1.00x | 1.00x | 0 | 0 |"]
        for number, text in enumerate(options.schedules):
            selection, on_stale, staleness = text.split("/")
            schedule = {"order": selection, "on_stale": on_stale, "max_staleness_steps": int(staleness)}
            Uneven.num_begun.clear()
            cfg = settings(folder, f"run_{number}", options.steps, {"fully_async": {"enabled": True, **schedule}})
            rows = train(cfg)
            speed, replay = replayed(Path(cfg.trainer.run_dir))
            gain = predicted(costs, order, schedule) / simulated_base
            age, stale = (
                fmean(row[f"async/{name}"] for row in rows) for name in ("staleness_mean", "stale_token_share")
            )
            lines.append(
                f"| S = {staleness}, `{selection}`, `{on_stale}` | {speed:.2f} | {replay:.2f} | {speed / base:.2f}x "
                f"| {gain:.2f}x | {age:.1f} | {stale:.0%} |"
            )
    machine = f"{os.cpu_count()} CPUs, Python {platform.python_version()}, torch {version('torch')}"
    print(
        f"\n{GROUPS} prompts x {SAMPLES} samples, {options.steps} steps, {SECONDS:g} s to grade and {TIMES} times as "
        f"long for one answer in {SAMPLES * ONE_PROMPT_IN}.\n"
        f"Synchronous run: a training step {costs.step_seconds:.3f} s, a sync {costs.sync_seconds:.3f} s, an iteration "
        f"{costs.seconds_per_iteration * 1000:.1f} ms.\n"
        f"{machine}, load {load:.1f} before and {os.getloadavg()[0]:.1f} after.\n\n"
        "| | samples/s | replayed | measured gain | predicted gain | mean age | tokens too old |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
