"""Runs of `main_distill`: every variant brings the student nearer to its teachers, wherever these compute, and mistakes
are refused before anything starts."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skyrl_train.config import SkyRLConfig, get_config_as_dict
from skyrl_train.distillation_trainer import DistillationTrainer
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.entrypoints.main_distill import DEFAULTS, DistillationExp
from skyrl_train.errors import ConfigError
from skyrl_train.teachers import TeacherScores, score_rows
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

Distil = Callable[..., SkyRLConfig]
ENGINE = {"teachers": {"main": {"engines": 1}}}


@pytest.fixture(scope="session")
def teacher(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The student's model, three times as sure of its choices."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    model = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    model.save_pretrained(folder)
    build_character_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def distil(settings: Any, merged: Any, teacher: str, tmp_path: Path) -> Distil:
    """`distil({setting: value}, name="run")`: settings of a run under the entry point's defaults."""

    def make(distillation: dict[str, Any], changes: dict[str, Any] | None = None, name: str = "run") -> SkyRLConfig:
        own: dict[str, Any] = {"teachers": {"main": {"model": teacher}}}
        base = settings(tmp_path / name, {"trainer": {"distillation": merged(own, distillation)}})
        for setting, value in DEFAULTS.items():
            *path, last = setting.split(".")
            section = base
            for part in path:
                section = getattr(section, part)
            setattr(section, last, value)
        base.generator.n_samples_per_prompt = 4
        base.trainer.policy_mini_batch_size = 4
        return SkyRLConfig.from_dict(merged(get_config_as_dict(base), changes or {}))

    return make


def metrics_of(cfg: SkyRLConfig) -> list[dict[str, float]]:
    DistillationExp(cfg).run()
    return RunFolder(cfg.trainer.run_dir).read_metrics()


VARIANTS = [
    ({"tokens": "sampled"}, "distillation/sampled_kl"),
    ({"tokens": "top_k", "top_k": 8}, "policy/teacher_kl"),
    ({"tokens": "top_k", "top_k": 8, "kl": "forward"}, "policy/teacher_kl"),
    ({"tokens": "full"}, "policy/teacher_kl"),
    ({"tokens": "full", "kl": "forward"}, "policy/teacher_kl"),
]


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize(
    ("variant", "metric"),
    [pytest.param(*each, id="-".join(map(str, each[0].values()))) for each in VARIANTS],
)
def test_run_reduces_distance_from_student_to_teacher(variant: dict[str, Any], metric: str, distil: Distil):
    longer = {"trainer": {"max_training_steps": 16, "epochs": 4, "policy": {"optimizer_config": {"lr": 1e-2}}}}
    steps = metrics_of(distil(variant, longer))
    divergences = [step[metric] for step in steps]
    assert sum(divergences[-3:]) < 0.8 * sum(divergences[:3]), divergences
    assert all(step["loss/share_of_rows_trained"] == 1.0 for step in steps)


@pytest.mark.parametrize(
    "variant", [{"tokens": "sampled"}, {"tokens": "top_k", "top_k": 5}, {"tokens": "full"}], ids=str
)
@pytest.mark.slow
def test_engine_teacher_trains_same_as_worker_teacher(variant: dict[str, Any], distil: Distil, merged: Any):
    in_workers = metrics_of(distil(variant, name="workers"))
    in_engine = metrics_of(distil(merged(variant, ENGINE), name="engine"))
    names = ["distillation/sampled_kl"] if variant["tokens"] == "sampled" else ["policy/teacher_kl"]
    for name in [*names, "policy/final_loss", "policy/grad_norm"]:
        expected = [step[name] for step in in_workers]
        assert [step[name] for step in in_engine] == pytest.approx(expected, rel=1e-3, abs=1e-4), name


@pytest.mark.slow
def test_rewards_are_weighted_by_coefficient(distil: Distil):
    """Only the rewards are left where the teacher is the student itself."""

    def run(reward_coef: float) -> list[dict[str, float]]:
        cfg = distil(
            {"reward_coef": reward_coef}, {"trainer": {"algorithm": {"advantage_estimator": "grpo"}}}, str(reward_coef)
        )
        cfg.trainer.distillation.teachers["main"].model = cfg.trainer.policy.model.path
        return metrics_of(cfg)

    alone, mixed = run(0.0), run(1.0)
    assert alone[0]["policy/grad_norm"] < 1e-3 < 0.1 * mixed[0]["policy/grad_norm"]
    assert alone[0]["reward/avg_raw_reward"] == mixed[0]["reward/avg_raw_reward"] > 0


def test_async_run_distils_with_teacher_of_each_row(distil: Distil):
    changes = {
        "trainer": {
            "placement": {"colocate_all": False},
            "fully_async": {"enabled": True, "max_staleness_steps": 1},
            "algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}},
        },
    }
    steps = metrics_of(distil({"tokens": "top_k", "top_k": 8}, changes))
    assert len(steps) == 2 and all(step["policy/teacher_kl"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("engine", [{}, ENGINE], ids=["workers", "engine"])
def test_resumed_run_equals_uninterrupted_run(engine: dict[str, Any], distil: Distil, merged: Any):
    def changes(steps: int) -> dict[str, Any]:
        return {"trainer": {"max_training_steps": steps, "ckpt_interval": 1, "hf_save_interval": -1}}

    variant = merged({"tokens": "top_k", "top_k": 8}, engine)
    whole = metrics_of(distil(variant, changes(3), "whole"))
    metrics_of(distil(variant, changes(1), "parts"))
    parts = metrics_of(distil(variant, changes(3), "parts"))
    for name in ("policy/final_loss", "policy/teacher_kl", "policy/grad_norm", "reward/avg_raw_reward"):
        assert [step[name] for step in parts] == [step[name] for step in whole], name


class Constant:
    """A teacher that gives every token the same log-prob, and prefers one token."""

    def __init__(self, log_prob: float, token: int):
        self.log_prob, self.token = log_prob, token

    async def score(self, batch: TrainingInputBatch, num_top: int) -> TeacherScores:
        shape = (len(batch), batch.metadata["response_length"], *([num_top] if num_top else []))
        tokens = torch.full(shape, self.token, dtype=torch.int32) if num_top else None
        return TeacherScores(torch.full(shape, self.log_prob), tokens)


@pytest.mark.parametrize("num_top", [0, 2])
async def test_each_row_is_scored_by_assigned_teacher(num_top: int):
    ids = torch.zeros(3, 4, dtype=torch.long)
    batch = TrainingInputBatch(
        sequences=ids, attention_mask=ids + 1, metadata={"uids": ["0", "1", "2"], "response_length": 2}
    )
    teachers = {"a": Constant(-1.0, 3), "b": Constant(-2.0, 9), "idle": Constant(-3.0, 1)}
    scores = await score_rows(teachers, batch, ["b", "a", "b"], num_top, vocab_size=9)
    own = scores.log_probs.flatten(1)[:, 0].tolist()
    if not num_top:
        assert own == [-2.0, -1.0, -2.0]
    else:  # token 9 is none of the student's
        assert own == [-torch.inf, -1.0, -torch.inf]
        assert scores.ids is not None and scores.ids[:, 0, 0].tolist() == [0, 3, 0]


def test_data_source_selects_teacher(distil: Distil, teacher: str, tmp_path: Path):
    data = tmp_path / "two.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{i}"}], "data_source": "ab"[i % 2]} for i in range(8)]
    data.write_text("\n".join(map(json.dumps, rows)))
    cfg = distil({"teachers": {"main": {"data_sources": ["a"]}, "other": {"model": teacher, "engines": 1}}})
    cfg.data.train_data = [str(data)]
    experiment = DistillationExp(cfg)
    trainer = DistillationTrainer.__new__(DistillationTrainer)
    trainer.cfg, trainer.train_dataset = experiment.cfg, experiment.train_dataset
    assert [trainer._get_teacher(uid) for uid in ("0", "1", "2#2", "3#2")] == ["main", "other", "main", "other"]
    assert len(metrics_of(cfg)) == 2


# ---- mistakes


def free_url() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{server.getsockname()[1]}"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no teacher": ({"teachers": {"main": {"model": ""}}}, r"teachers\.main\.model is empty"),
    "wrong path": ({"teachers": {"main": {"model": "/no/such"}}}, r"teachers\.main\.model=/no/such: no such"),
    "server not listening": (
        {"teachers": {"main": {"urls": ["{url}"]}}},
        r"teachers\.main\.urls: .*cannot be reached|teachers\.main\.urls: .*refused",
    ),
    "other tokenizer": (
        {"teachers": {"main": {"model": "{other_tokenizer}"}}},
        "different vocabularies",
    ),
    "no teacher for a row": (
        {"teachers": {"main": {"data_sources": ["math"]}}},
        "data_source='toy', which no teacher lists",
    ),
    "too many tokens": ({"tokens": "top_k", "top_k": 100_000}, r"top_k=100000 must be below the \d+ tokens"),
    "too much memory": ({"tokens": "full", "memory_gb": 1e-6}, r"may take .* GB .*more than .*memory_gb=1e-06"),
    "forward KL of sampled tokens": ({"kl": "forward"}, "use tokens=top_k or full, or kl=reverse"),
    "top_k that nothing reads": ({"top_k": 5}, "only with trainer.distillation.tokens=top_k"),
    "two teachers of one source": (
        {"teachers": {"main": {"data_sources": ["toy"]}, "b": {"model": "x", "data_sources": ["toy"]}}},
        "both name 'toy'",
    ),
    "engines and servers": (
        {"teachers": {"main": {"engines": 1, "urls": ["http://h"]}}},
        "both say where the teacher runs",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_setting_is_refused_by_name_before_start(mistake: str, distil: Distil, tmp_path: Path, teacher: str):
    values, message = MISTAKES[mistake]
    other = tmp_path / "other_tokenizer"
    tokenizer = build_character_tokenizer()
    tokenizer.add_tokens(["<more>"])
    build_tiny_qwen3(hidden_size=32, vocab_size=len(tokenizer)).save_pretrained(other)
    tokenizer.save_pretrained(other)
    text = json.dumps(values).replace("{url}", free_url()).replace("{other_tokenizer}", str(other))
    with pytest.raises(ConfigError, match=message):
        DistillationExp(distil(json.loads(text)))


def test_megatron_refuses_full_vocabulary_tokens(distil: Distil):
    cfg = distil({"tokens": "full"}, {"trainer": {"strategy": "megatron"}})
    with pytest.raises(ConfigError, match=r"trainer\.strategy=fsdp2"):
        DistillationExp(cfg)


def test_main_base_error_names_distillation_entry_point(distil: Distil):
    with pytest.raises(ConfigError, match="main_distill"):
        BasePPOExp(distil({}))


@pytest.mark.full  # test_inline_runs.py compares the launchers
def test_inline_run_equals_run_under_ray(distil: Distil, ray_cpu: None):
    def metrics(launcher: str) -> list[dict[str, float]]:
        return metrics_of(
            distil({"tokens": "top_k", "top_k": 8}, {"trainer": {"placement": {"launcher": launcher}}}, launcher)
        )

    for inline, under_ray in zip(metrics("inline"), metrics("ray"), strict=True):
        for name in ("policy/final_loss", "policy/teacher_kl", "policy/grad_norm", "reward/avg_raw_reward"):
            assert under_ray[name] == inline[name], name
