"""Parts that the tutorials share: a tiny model, rows, the quickstart's settings at a size that trains in seconds."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: matrices this small are slower on several threads
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

import pyarrow
import pyarrow.parquet
from model import make_model, make_tokenizer
from run import LAUNCHERS, REPOSITORY, script_settings
from tasks import TASKS

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig, compose_config, validate_cfg
from skyrl_train.config.supervised import SupervisedConfig
from skyrl_train.entrypoints.main_sft import start
from skyrl_train.utils.run_folder import RunFolder

RUNS = Path(os.environ.get("TUTORIAL_RUNS", REPOSITORY / "runs" / "tutorials"))
"""Folder of the tutorials' runs."""

SMALL = [
    "trainer.train_batch_size=8",
    "trainer.policy_mini_batch_size=8",
    "trainer.policy.optimizer_config.lr=5e-3",
    "trainer.eval_interval=-1",
    "trainer.ckpt_interval=-1",
    "trainer.hf_save_interval=-1",
    "trainer.print_example_interval=-1",
    "generator.sampling_params.max_generate_length=8",
]
"""Settings on top of the quickstart's: 8 prompts x 8 samples a step, answers of up to 8 tokens."""


class DigitsEnv(BaseTextEnv):
    """Environment `digits`: the reward is the share of digits among the 8 tokens that an answer may have."""

    def __init__(self, env_config: object = None, extras: object = None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        reward = sum(character in "0123456789" for character in action) / 8
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


skyrl_gym.register(id="digits", entry_point=DigitsEnv)


def prepare(name: str) -> Path:
    """Make a tutorial's folder, with the quickstart's model of 0.1 million random weights and its tokenizer of 109
    symbols. What an earlier start left there is deleted."""
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "data").mkdir(parents=True)
    make_tokenizer().save_pretrained(folder / "model")
    make_model(TASKS["arithmetic"], seed=0).save_pretrained(folder / "model")
    return folder


def write_rows(folder: Path, rows: Sequence[Mapping[str, object]], name: str = "train") -> Path:
    """Save rows of data for `settings`."""
    path = folder / "data" / f"{name}.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def digit_rows() -> list[dict[str, Any]]:
    """Return 64 prompts for `DigitsEnv`."""
    return [{"prompt": [{"role": "user", "content": f"write {number}"}]} for number in range(64)]


def settings(folder: Path, *overrides: str) -> SkyRLConfig:
    """Compose the quickstart's settings for a run in this process, with changes as on a command line (`key=value`)."""
    return validate_cfg(
        compose_config(script_settings(folder, "arithmetic", [*LAUNCHERS["inline"], *SMALL, *overrides]))
    )


def train_on_demonstrations(folder: Path, conversations: Sequence[Sequence[Mapping[str, str]]], steps: int) -> Path:
    """Train the folder's model on the assistant's messages, as `main_sft` does. Returns: the folder of the result."""
    (folder / "demonstrations.jsonl").write_text(
        "\n".join(json.dumps({"messages": list(messages)}) for messages in conversations)
    )
    overrides = [
        f"data.train_data=['{folder / 'demonstrations.jsonl'}']",
        f"trainer.policy.model.path={folder / 'model'}",
        f"trainer.run_dir={folder / 'supervised'}",
        f"trainer.max_training_steps={steps}",
        f"trainer.hf_save_interval={steps}",
        "trainer.placement.launcher=inline",
        "trainer.placement.policy_num_gpus_per_node=1",
        "trainer.policy.optimizer_config.lr=4e-3",
        "trainer.micro_train_batch_size_per_gpu=64",
        "trainer.epochs=1000",
        "trainer.bf16=false",
        "trainer.ckpt_interval=-1",
        "trainer.eval_interval=-1",
    ]
    start(compose_config(overrides, SupervisedConfig), SupervisedConfig)
    return folder / "supervised" / "exports" / f"global_step_{steps}" / "policy"


def print_curve(run_dir: str | Path) -> list[float]:
    """Print the mean training reward of each step, from the run's metrics, with a bar. Returns: the rewards."""
    rewards = [row["reward/avg_raw_reward"] for row in RunFolder(run_dir).read_metrics() if row["step"] > 0]
    for step, reward in enumerate(rewards, start=1):
        print(f"step {step:3d}  {reward:6.3f}  {'#' * round(40 * reward)}")
    return rewards
