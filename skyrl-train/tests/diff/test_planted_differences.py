"""Twelve differences between two runs, each planted alone: the comparison names the right cause first."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import skyrl_gym
from skyrl_inspect.diff import compare_runs
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.weight_sync.base import WrittenBucket
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.tiny_runs import merge_settings, register_environments

NOT_THE_CAUSE = {
    "trainer": {
        "run_name": "another",
        "project_name": "other",
        "export_path": "/tmp/elsewhere",
        "max_ckpts_to_keep": 3,
    },
    "generator": {"http_endpoint_port": 9999, "engine_start_timeout_seconds": 777},
}


def steps(count: int, **trainer: Any) -> dict[str, Any]:
    return {"trainer": {"max_training_steps": count, **trainer}}


SETTINGS = {  # by the right cause: changes, and how the first difference begins
    "trainer.seed": (steps(1, seed=7), "prompt of sample 0 of step 1"),
    "generator.sampling_params.temperature": (steps(1) | {"generator": {"sampling_params": {"temperature": 0.9}}}, ""),
    "trainer.algorithm.policy_loss_type": (steps(1, algorithm={"policy_loss_type": "sapo"}), "policy/policy_loss"),
    "generator.backend": (steps(1) | {"generator": {"backend": "coarse"}}, "rollout log-prob of token 0 of sample 0"),
    "trainer.micro_train_batch_size_per_gpu": (steps(2, micro_train_batch_size_per_gpu=2), ""),
    "generator.model_dtype": (
        steps(1) | {"generator": {"model_dtype": "bfloat16"}},
        "weights model.embed_tokens.weight before step 1",
    ),
    "environment.env_class": (steps(1) | {"environment": {"env_class": "early_characters"}}, "reward of token"),
}


@pytest.mark.first_case
@pytest.mark.parametrize("setting", SETTINGS)
def test_planted_setting_ranks_first(setting: str, train: Callable[..., Path], base_run: Path, tmp_path: Path):
    changes, first = SETTINGS[setting]
    found = compare_runs(base_run, train(tmp_path / "b", merge_settings(changes, NOT_THE_CAUSE)))
    assert found.causes[0].name == setting, found.causes
    assert found.verdict.count("likely cause: ") == 1
    assert str(found.parting[0]).startswith(first), found.verdict
    for cause in found.causes:
        for name in ("run_name", "project_name", "path", "port", "timeout", "run_dir"):
            assert name not in cause.name
    assert found.equal_up_to in (None, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "quantity", "change"),
    [
        (lambda rows: rows[5]["prompt"][0].update(content="write V"), "prompt", "first in row 5, 1 of 16 rows differ"),
        (lambda rows: rows[5].update(worth=0.5), "reward", "1 of 16 rows differ"),
        (lambda rows: rows.reverse(), None, "the same rows in a different order"),
    ],
    ids=["row", "answer", "order"],
)
def test_planted_data_ranks_first(
    plant: Any,
    quantity: str | None,
    change: str,
    train: Any,
    base_run: Path,
    rows: Any,
    write_rows: Any,
    tmp_path: Path,
):
    data = rows()
    plant(data)
    changed = {"data": {"train_data": [write_rows(tmp_path / "data.jsonl", data)]}}
    found = compare_runs(base_run, train(tmp_path / "b", changed if quantity else changed | steps(1)))
    assert found.causes[0].name == "training data"
    assert change in found.causes[0].change
    if quantity is not None:
        first = found.parting[0]
        assert (first.uid, first.quantity[:6]) == ("5", quantity)
        assert found.equal_up_to == first.step - 1, "until the row comes, the runs are the same"
        assert quantity == "reward" or ("write 5" in first.a and "write V" in first.b)


@pytest.mark.slow
def test_planted_learning_rate_at_step_7_ranks_first(train: Callable[..., Path], base_run: Path, tmp_path: Path):
    train(tmp_path / "b", steps(6, ckpt_interval=6))
    slower = {"policy": {"optimizer_config": {"lr": 5e-4}}}
    found = compare_runs(base_run, train(tmp_path / "b", steps(7, **slower)))
    assert found.causes[0].name == "trainer.policy.optimizer_config.lr"
    assert "(from step 7 on)" in found.causes[0].change
    assert found.equal_up_to == 6
    assert found.verdict == (
        "equal up to step 6; first difference: policy/policy_lr of step 7: 0.001 against 0.0005, "
        "a difference of 0.0005; "
        "likely cause: trainer.policy.optimizer_config.lr: 0.001 against 0.0005 (from step 7 on)"
    )
    assert [cause.name for cause in found.causes if cause.likelihood == "likely"] == [found.causes[0].name]


class FlippingPolicy(PolicyWorker):
    """A policy that sends one weight with its sign flipped, in the sync after step 2."""

    def _parameters(self) -> Any:
        for name, tensor in super()._parameters():
            if self._version == 2 and name == "model.layers.1.mlp.up_proj.weight":
                tensor = tensor.clone()
                tensor.view(-1)[3] *= -1
            yield name, tensor

    def write_bucket(self, version: int, index: int, held_version: int | None) -> WrittenBucket:
        self._version = version
        return super().write_bucket(version, index, held_version)

    def stage_bucket(self, version: int, index: int) -> bool:
        self._version = version
        return super().stage_bucket(version, index)


class FlippingTrainer(RayPPOTrainer):
    async def build_models(self, *_: Any) -> None:
        await super().build_models(FlippingPolicy)


class FlippingExperiment(BasePPOExp):
    def get_trainer(self, **parts: Any) -> RayPPOTrainer:  # type: ignore[override]
        return FlippingTrainer(**parts)


def test_planted_flipped_weight_ranks_first(train: Callable[..., Path], base_run: Path, tmp_path: Path):
    changes = {**steps(3), "generator": {"weight_sync_canary_interval": 0}}
    found = compare_runs(base_run, train(tmp_path / "b", changes, FlippingExperiment))
    assert found.equal_up_to == 1
    assert str(found.parting[0]) == ("weights model.layers.1.mlp.up_proj.weight of step 2 (1 of 24 tensors differ)")
    assert found.causes[0].name == "weights model.layers.1.mlp.up_proj.weight at the sync after step 2"


def test_planted_library_version_ranks_first(copy: Path, base_run: Path, edit_lines: Any):
    """Another version of torch rounds otherwise: from step 3 on."""
    edit_lines(copy / "starts.jsonl", lambda row: row["libraries"].update(torch="2.2.0", rich="1.0.0", ray="2.0"))

    def round_off(row: dict[str, Any]) -> None:
        row["tokens"]["log_probs"] = [value + 3e-7 for value in row["tokens"]["log_probs"]]

    for step in range(3, 9):
        edit_lines(copy / f"trajectories/train_step_{step:06d}.jsonl", round_off)
    edit_lines(copy / "metrics.jsonl", lambda row: row.update({"policy/final_loss": row["policy/final_loss"] + 1e-8}))
    found = compare_runs(base_run, copy)
    assert found.causes[0].name == "library torch"


def test_library_of_other_step_does_not_rank_first(copy: Path, base_run: Path, edit_lines: Any):
    edit_lines(copy / "starts.jsonl", lambda row: row["libraries"].update(torch="2.2.0", sympy="1.0.0"))
    edit_lines(
        copy / "trajectories/train_step_000004.jsonl", lambda row: row["tokens"]["rewards"].__setitem__(-1, 0.25)
    )
    found = compare_runs(base_run, copy)
    assert found.causes[0].name == "library sympy"


@pytest.mark.slow
def test_planted_environment_code_ranks_first(train: Callable[..., Path], base_run: Path, tmp_path: Path):
    """The id stays, the class behind it does not."""
    other: Any = skyrl_gym.spec("early_characters").entry_point
    with register_environments(different_characters=other):
        found = compare_runs(base_run, train(tmp_path / "b", steps(1)))
    assert found.causes[0].name == "environment different_characters"
    assert found.parting[0].quantity == "reward"


@pytest.mark.parametrize("part", ["ids", pytest.param("template", marks=pytest.mark.slow)])
def test_planted_tokenizer_ranks_first(
    part: str, train: Callable[..., Path], base_run: Path, chat_model: str, tmp_path: Path
):
    """The same weights beside another tokenizer."""
    model = Path(shutil.copytree(chat_model, tmp_path / "model"))
    if part == "ids":
        path = model / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["w"], vocabulary["q"] = vocabulary["q"], vocabulary["w"]
        path.write_text(json.dumps(tokenizer))
    else:
        tokenizer = AutoTokenizer.from_pretrained(chat_model)
        tokenizer.chat_template = tokenizer.chat_template.replace("role'] }}:", "role'] }}>")
        tokenizer.save_pretrained(model)
    changes = steps(1, policy={"model": {"path": str(model)}})
    found = compare_runs(base_run, train(tmp_path / "b", changes))
    assert found.causes[0].name == "tokenizer"
    assert found.parting[0].quantity.startswith("id of prompt token" if part == "ids" else "prompt from character")


@pytest.mark.slow
def test_other_weights_with_same_tokenizer_rank_model_first(
    train: Callable[..., Path], base_run: Path, chat_model: str, tmp_path: Path
):
    from skyrl_train_testing.tiny_models import build_tiny_qwen3

    model = Path(shutil.copytree(chat_model, tmp_path / "model"))
    with torch.random.fork_rng(devices=[]):
        build_tiny_qwen3(hidden_size=32, vocab_size=99, max_position_embeddings=256, scale=1.5).save_pretrained(model)
    found = compare_runs(base_run, train(tmp_path / "b", steps(1, policy={"model": {"path": str(model)}})))
    assert found.causes[0].name == "trainer.policy.model.path"


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes, cause",
    [
        # Settings that take effect later, or only round, beside the one that parts the runs.
        (
            {
                "generator": {"sampling_params": {"temperature": 0.9}},
                "trainer": {"policy": {"optimizer_config": {"lr": 2e-3}}, "micro_train_batch_size_per_gpu": 2},
            },
            "generator.sampling_params.temperature",
        ),
        (
            {"trainer": {"seed": 7, "algorithm": {"policy_loss_type": "sapo"}}, "generator": {"backend": "coarse"}},
            "trainer.seed",
        ),
        (
            {
                "environment": {"env_class": "early_characters"},
                "trainer": {"policy": {"optimizer_config": {"lr": 2e-3}}, "algorithm": {"eps_clip_low": 0.1}},
            },
            "environment.env_class",
        ),
    ],
)
def test_cause_ranks_above_other_differing_settings(
    changes: dict[str, Any], cause: str, train: Callable[..., Path], base_run: Path, tmp_path: Path
):
    found = compare_runs(base_run, train(tmp_path / "b", merge_settings(steps(1), changes)))
    assert found.causes[0].name == cause
