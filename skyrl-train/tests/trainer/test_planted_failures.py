"""Diagnostics of real runs with a planted failure: each is named, and its onset with it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.config import validate_cfg
from skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments

pytestmark = pytest.mark.slow

NUM_STEPS = 8
BROKEN = "broken_now_and_then"


class NeverRewarded(DifferentCharacters):
    def reward(self, action: str) -> float:
        return 0.0


class Down(DifferentCharacters):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        raise ConnectionError("the search server is down")


def broken_now_and_then() -> Callable[..., Any]:
    """Make a policy loss with gradients that are not finite in each sixth micro-batch, of four a step."""
    calls = 0

    def loss(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs):
        nonlocal calls
        calls += 1
        factor = float("nan") if calls % 6 == 0 else 1.0
        return -advantages * torch.exp(log_probs - old_log_probs) * factor, {}

    return loss


def write_rows(path: Path, make: Callable[[int], dict[str, Any]]) -> str:
    rows = ({"data_source": "toy", "prompt": [{"role": "user", "content": f"write {i}"}]} | make(i) for i in range(16))
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def policy(lr: float) -> dict[str, Any]:
    return {"policy": {"optimizer_config": {"lr": lr}}}


FAILURES: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate of 1000 times": ({"trainer": policy(1.0)}, "reward-collapse"),
    "nothing is rewarded": ({"environment": {"env_class": "never_rewarded"}}, "no-gradient"),
    "an environment is down": ({"data": {"train_data": ["{down}"]}}, "rollout-failures"),
    "one prompt": ({"data": {"train_data": ["{same}"]}}, "few-prompts"),
    "low length limit": ({"generator": {"sampling_params": {"max_generate_length": 4}}}, "truncation"),
    "loss that is not finite": (
        {"trainer": {"algorithm": {"policy_loss_type": BROKEN}}},
        "skipped-updates",
    ),
    "no pull to the reference": (
        {"trainer": {"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.0}} | policy(0.3)},
        "kl-runaway",
    ),
    "critic with large steps": (
        {
            "trainer": {
                "critic": {"model": {"path": "{model}"}, "optimizer_config": {"lr": 3.0, "max_grad_norm": 1e9}},
                "critic_mini_batch_size": 4,
                "algorithm": {"advantage_estimator": "gae"},
            }
        },
        "value-loss",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failure_of_real_run_is_diagnosed(name: str, settings: Any, run: Any, chat_model: str, tmp_path: Path):
    changes, expected = FAILURES[name]
    files = {
        "model": chat_model,
        "down": write_rows(tmp_path / "down.jsonl", lambda i: {"env_class": "down"} if i % 4 == 0 else {}),
        "same": write_rows(tmp_path / "same.jsonl", lambda i: {"prompt": [{"role": "user", "content": "write"}]}),
    }
    text = json.dumps(changes)
    for key, path in files.items():
        text = text.replace("{" + key + "}", path)
    PolicyLossRegistry.register(BROKEN, broken_now_and_then())
    try:
        with register_environments(never_rewarded=NeverRewarded, down=Down):
            cfg = settings(tmp_path / "run", json.loads(text))
            cfg.trainer.max_training_steps, cfg.trainer.epochs = NUM_STEPS, 10
            rows = run(validate_cfg(cfg))
    finally:
        PolicyLossRegistry.unregister(BROKEN)
    found = {record["name"]: record for record in RunFolder(tmp_path / "run").read_diagnostics()}
    assert len(rows) == NUM_STEPS and expected in found, found
    assert found[expected]["step"] - found[expected]["onset"] <= 5
