"""Whole runs whose trajectories a harness makes: under the synchronous and the asynchronous trainer, in one process."""

from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import AllRolloutsFailedError, ConfigError
from skyrl_train.generators.harness.task import HarnessTask
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import make_tiny_run, write_prompts

ASYNCHRONOUS = {
    "trainer": {
        "placement": {"colocate_all": False},
        "algorithm": {"off_policy_correction": {"tis_ratio_type": "token"}, "loss_reduction": "sequence_mean"},
        "fully_async": {"enabled": True, "max_staleness_steps": 2},
    }
}
RUNS: dict[str, Any] = {"synchronous": {}, "asynchronous": ASYNCHRONOUS}


def delegates(task: HarnessTask) -> float:
    """Ask a model, a sub-agent of the same, and the model again. Returns: the share of different characters."""
    with OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:

        def ask(*texts: str) -> str:
            roles = ("user", "assistant", "user")
            messages: Any = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            return client.chat.completions.create(model=task.model, messages=messages).choices[0].message.content or ""

        first = ask(task.text)
        ask("another agent's work")
        second = ask(task.text, first, "more")
    return len(set(first + second)) / max(1, len(first + second))


def settings_of(folder: Path, model: str, function: Any, *changes: Any) -> dict[str, Any]:
    harness = {"function": f"{__name__}:{getattr(function, '__name__', function)}", "sandbox": "process"}
    prompts = write_prompts(folder / "prompts.jsonl", 8)
    own = {
        "environment": {"env_class": None},
        "trainer": {"train_batch_size": 2},
        "generator": {"harness": harness, "n_samples_per_prompt": 2, "sampling_params": {"max_generate_length": 6}},
    }
    return make_tiny_run(folder / "run", model, prompts, own, *changes)


@pytest.mark.first_case
@pytest.mark.parametrize("kind", list(RUNS))
def test_harness_trains_on_exact_sampled_tokens(kind: str, chat_model: str, tmp_path: Path):
    cfg = SkyRLConfig.from_dict(settings_of(tmp_path, chat_model, delegates, RUNS[kind]))
    BasePPOExp(cfg).run()
    folder = RunFolder(cfg.trainer.run_dir)
    metrics = folder.read_metrics()
    assert len(metrics) == 2
    for row in metrics:
        assert (row["tokens/exact_share"], row["tokens/trained_share"]) == (1.0, 1.0)
        assert row["generate/avg_num_turns"] == 3 and row["tokens/rows_per_trajectory"] == 2
        assert row["policy/rollout_train_logprobs_abs_diff_max"] < (1e-5 if kind == "synchronous" else 1.0)
        assert row["policy/grad_norm"] > 0
    rows = folder.read_trajectories(1, "train")
    assert [row["is_last_step"] for row in rows[:2]] == [False, True]
    assert all(row["certificate"]["trained"] == row["certificate"]["exact"] > 0 for row in rows)


def silent(task: HarnessTask) -> float:
    return 1.0


def test_harness_without_requests_ends_run_with_error(chat_model: str, tmp_path: Path):
    cfg = SkyRLConfig.from_dict(settings_of(tmp_path, chat_model, silent))
    with pytest.raises(AllRolloutsFailedError, match="no_answer"):
        BasePPOExp(cfg).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": {"harness": {"command": ["sh"]}}}, "generator.harness.function"),
        (
            {"environment": {"env_class": "gsm8k"}, "generator": {"harness": {"function": None}}},
            "generator.harness.sandbox",
        ),
        ({"generator": {"harness": {"function": "no.such:name"}}}, "package.module"),
        ({"generator": {"max_turns": 3}}, "generator.max_turns=3"),
        ({"generator": {"sampling_params": {"stop": ["END"]}}}, "sampling_params.stop"),
        (
            {"generator": {"eval_sampling_params": {"additional_kwargs": {"min_tokens": 2}}}},
            "generator.eval_sampling_params.additional_kwargs",
        ),
        ({"generator": {"harness": {"visible": ["somewhere"]}}}, "'somewhere', which must be the absolute path"),
        ({"trainer": {"algorithm": {"advantage_estimator": "reinforce++"}}}, "generator.harness"),
    ],
)
def test_invalid_setting_is_refused_before_start(changes: Any, message: str, chat_model: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        BasePPOExp(SkyRLConfig.from_dict(settings_of(tmp_path, chat_model, delegates, changes)))
