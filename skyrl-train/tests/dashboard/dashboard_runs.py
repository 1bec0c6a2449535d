"""Run folders for tests of the dashboard, written by the functions that a run writes them with."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import skyrl_gym
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import DifferentCharacters, make_tiny_run, write_prompts

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">\x1b[31mred\u202e"
)
CONFIG = """trainer:
  run_name: {name}
  seed: {seed}
  algorithm: {{use_kl_loss: true}}
  policy: {{model: {{path: tiny}}, optimizer_config: {{lr: {lr:.1e}}}}}
environment: {{env_class: gsm8k}}
"""


def trajectory(
    uid: str = "0", sample: int = 0, *, reward: float = 1.0, tokens: Sequence[str] = ("4", "6"), failed: bool = False
) -> dict[str, Any]:
    """Return a row as `trajectory_rows` makes it."""
    count = len(tokens)
    return {
        "uid": uid,
        "sample": sample,
        "prompt": f"<|im_start|>user\n12+34={HOSTILE}<|im_end|>\n<|im_start|>assistant\n",
        "response": "".join(tokens),
        "reward": reward,
        "stop_reason": "stop",
        "failure": {"kind": "tool", "message": HOSTILE} if failed else None,
        "prompt_ids": [1, 2, 3],
        "tokens": {
            "text": list(tokens),
            "ids": list(range(count)),
            "loss_mask": [1] * count,
            "log_probs": [-0.5 - index % 7 for index in range(count)],
            "rewards": [0.0] * (count - 1) + [reward],
            "weight_versions": [index * 2 // count for index in range(count)],
        },
    }


def write_run(
    path: Path,
    num_steps: int = 3,
    *,
    total: int = 3,
    last_record: str = "",
    name: str | None = None,
    seed: int = 7,
    lr: float = 1e-6,
) -> RunFolder:
    """Write a run of a few steps, two prompts of two samples each; the first prompt's rewards are equal.

    Args:
        total: steps that its log announces.
        last_record: level and text of a last record of the log.
        name: of the run; None: of its folder.
        seed, lr: settings.
    """
    run = RunFolder(path)
    run.write_config(CONFIG.format(name=name or path.name, seed=seed, lr=lr))
    lines = [f"2026-01-01 00:00:00 INFO    step plan\nthe run: {total} training steps\n"]
    for step in range(1, num_steps + 1):
        run.append_metrics(step, {"reward/avg_raw_reward": step / 10, "policy/x": float(step), "timing/step": 2.0})
        rows = [trajectory("0", 0), trajectory("0", 1), trajectory("1", 0, reward=0.0), trajectory("1", 1, failed=True)]
        run.write_trajectories(step, "train", rows)
        lines.append(f"2026-01-01 00:00:0{step % 10} INFO    step {step}/{total}  reward {step / 10}\n")
    if last_record:
        lines.append(f"2026-01-01 00:01:00 {last_record}\n")
    run.logs_folder.mkdir(exist_ok=True)
    run.log_path("trainer").write_text("".join(lines))
    return run


def make_old(run: RunFolder, seconds: float) -> None:
    """Let the files of a run have been written some time ago."""
    for path in [*run.path.rglob("*")]:
        when = path.stat().st_mtime - seconds
        os.utime(path, (when, when))


class ManyCharacters(DifferentCharacters):
    """Environment that rewards different characters, after a while."""

    async def step(self, action: str) -> Any:
        await asyncio.sleep(0.05)
        return super().step(action)


def tiny_settings(run_dir: Path, model: str, num_steps: int) -> dict[str, Any]:
    """Return the settings of an asynchronous run of `train`, and write its prompts."""
    trainer = {
        "placement": {"colocate_all": False},
        "fully_async": {"enabled": True, "max_staleness_steps": 2},
        "algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}},
        "policy_mini_batch_size": 4,
        "epochs": 1000,
        "max_training_steps": num_steps,
    }
    changes = {"environment": {"env_class": "many_characters"}, "trainer": trainer}
    return make_tiny_run(run_dir, model, write_prompts(run_dir.parent.parent / "prompts.jsonl"), changes)


def train(settings: dict[str, Any]) -> None:
    """Train in this process, which is one for it alone."""
    from skyrl_train.config import SkyRLConfig
    from skyrl_train.entrypoints.main_base import run_experiment

    skyrl_gym.register(id="many_characters", entry_point=ManyCharacters)
    run_experiment(SkyRLConfig.from_dict(settings))
