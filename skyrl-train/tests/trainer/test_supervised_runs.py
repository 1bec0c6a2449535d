"""Supervised training: demonstrations are learned, preferences are learned, a run resumes exactly."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_supervised_cfg
from skyrl_train.entrypoints.main_sft import SupervisedExp


@pytest.fixture(scope="module")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A digit is answered with its successor, in words of different lengths."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"after {i}?"},
                {"role": "assistant", "content": str(i + 1) * (1 + i % 3)},
            ]
        }
        for i in range(8)
    ]
    return written(tmp_path_factory, rows)


@pytest.fixture(scope="module")
def preferences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Politeness is preferred."""
    rows = [{"prompt": f"give me {i}", "chosen": f"please, {i}", "rejected": f"{i}!"} for i in range(8)]
    return written(tmp_path_factory, rows)


def written(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> str:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def run(config_type: type[SupervisedConfig], path: str, data: str, run_dir: Path, **trainer: Any) -> list[dict]:
    """Runs with some settings, in processes if there are several ranks; every logged step."""
    ranks, device = trainer.pop("ranks", 1), trainer.pop("device", "cpu")
    policy = {"model": {"path": path, **trainer.pop("model", {})}, "optimizer_config": {"lr": trainer.pop("lr", 1e-2)}}
    settings = {
        "data": {"train_data": [data], "val_data": [data], "max_length": 64},
        "trainer": {
            "run_dir": str(run_dir),
            "policy": policy,
            "placement": {
                "device": device,
                "launcher": "ray" if ranks > 1 else "inline",
                "policy_num_gpus_per_node": ranks,
            },
            "bf16": False,
            "epochs": 100,
            "max_training_steps": 4,
            "train_batch_size": 4,
            "eval_batch_size": 8,
            "eval_interval": 1000,
            "ckpt_interval": -1,
            **trainer,
        },
    }
    SupervisedExp(validate_supervised_cfg(settings, config_type)).run()
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def column(steps: list[dict], name: str) -> list[float]:
    return [step[name] for step in steps if name in step]


@pytest.mark.gpu
def test_supervised_steps_on_gpu_match_cpu(chat_model, demonstrations, tmp_path):
    on_cpu, on_gpu = (
        run(SupervisedConfig, chat_model, demonstrations, tmp_path / device, device=device)
        for device in ("cpu", "cuda")
    )
    assert column(on_gpu, "train/loss") == pytest.approx(column(on_cpu, "train/loss"), rel=1e-3)


@pytest.mark.slow
def test_supervised_loss_decreases_on_demonstrations(chat_model, demonstrations, tmp_path):
    steps = run(
        SupervisedConfig, chat_model, demonstrations, tmp_path, max_training_steps=150, max_tokens_per_microbatch=256
    )
    before, after = column(steps, "eval/loss")
    assert before > 3.0
    assert after < 0.3
    assert column(steps, "eval/perplexity")[-1] == pytest.approx(math.exp(after))
    assert column(steps, "train/learnt_tokens")[0] < column(steps, "train/tokens")[0] / 2


@pytest.mark.full
def test_ranks_and_packing_keep_results_equal(chat_model, demonstrations, ray_cpu, tmp_path):
    plain = run(SupervisedConfig, chat_model, demonstrations, tmp_path / "plain", use_sample_packing=False)
    divided = run(
        SupervisedConfig, chat_model, demonstrations, tmp_path / "divided", ranks=2, max_tokens_per_microbatch=40
    )
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        assert column(divided, name) == pytest.approx(column(plain, name), rel=1e-4), name


def test_supervised_run_resumes_exactly(chat_model, demonstrations, tmp_path):
    whole = run(SupervisedConfig, chat_model, demonstrations, tmp_path / "whole", max_training_steps=6)
    first = dict(max_training_steps=6, ckpt_interval=3)
    run(SupervisedConfig, chat_model, demonstrations, tmp_path / "halves", **{**first, "max_training_steps": 3})
    halves = run(SupervisedConfig, chat_model, demonstrations, tmp_path / "halves", **first)
    assert column(halves, "train/loss") == column(whole, "train/loss")
    assert column(halves, "train/grad_norm") == column(whole, "train/grad_norm")


DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_preference_pairs_are_separated(device, chat_model, preferences, tmp_path):
    steps = run(PreferenceConfig, chat_model, preferences, tmp_path, lr=1e-3, max_training_steps=20, device=device)
    assert column(steps, "train/loss")[0] == pytest.approx(math.log(2), abs=1e-5)  # policy = reference: no preference
    first, last = column(steps, "eval/loss")
    assert first == pytest.approx(math.log(2), abs=1e-5)
    assert last < 0.3
    assert column(steps, "eval/accuracy")[-1] == 1.0


@pytest.mark.slow
def test_only_adapters_are_trained_and_export_is_merged(chat_model, demonstrations, tmp_path):
    steps = run(
        SupervisedConfig, chat_model, demonstrations, tmp_path, max_training_steps=20, hf_save_interval=100,
        model={"lora": {"rank": 4, "alpha": 8}},
    )  # fmt: skip
    assert column(steps, "eval/loss")[-1] < 0.96 * column(steps, "eval/loss")[0]
    export = tmp_path / "exports" / "global_step_20" / "policy"
    assert (export / "adapter" / "adapter_model.safetensors").is_file()
    base, merged = load_file(f"{chat_model}/model.safetensors"), load_file(export / "model.safetensors")
    assert base.keys() == merged.keys()
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert all("_proj" in name for name in changed)
