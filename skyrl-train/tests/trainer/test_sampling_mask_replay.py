"""Runs that sample from a truncated distribution, and train on its log-probs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_runs import asynchronous

from skyrl_train.config.validation import validate_cfg
from skyrl_train.errors import ConfigError
from skyrl_train.kept_tokens import KeptTokens
from skyrl_train.rollouts import collate as collate_module
from skyrl_train.training_batch import TrainingInputBatch

SAMPLING = {"sampling_params": {"top_p": 0.7, "top_k": 40, "temperature": 0.9}}
REPLAY = {"trainer": {"policy": {"sampling_mask_replay": True}}, "generator": SAMPLING}
SLOWLY = {"trainer": {"policy": {"optimizer_config": {"lr": 1e-6}}}}
CONVERSATION = {
    "environment": {"env_class": "up_to_three_turns"},
    "generator": {"max_turns": 3, "use_conversation_multi_turn": True},
}
STEP_WISE = {**CONVERSATION, "generator": {**CONVERSATION["generator"], "step_wise_trajectories": True}}
JOINED = {**STEP_WISE, "generator": {**STEP_WISE["generator"], "merge_stepwise_output": True}}
ONE_MESSAGE = {**CONVERSATION, "generator": {**CONVERSATION["generator"], "use_conversation_multi_turn": False}}
ASYNCHRONOUS = {"trainer": asynchronous(max_staleness_steps=1)}
KINDS = {
    "one turn": {},
    "one update": {"trainer": {"policy_mini_batch_size": 4}},
    "turns": CONVERSATION,
    "asynchronous": ASYNCHRONOUS,
    "stop tokens held back": {"generator": {"sampling_params": {"additional_kwargs": {"min_tokens": 5}}}},
}
TWO_RANKS = {"launcher": "ray", "policy_num_gpus_per_node": 2}
SLOW_KINDS = {
    "turns joined": JOINED,
    "form one message": ONE_MESSAGE,
    "padded": {"trainer": {"use_sample_packing": False}},
}
FULL_KINDS = {"deepspeed on two ranks": {"trainer": {"strategy": "deepspeed", "placement": TWO_RANKS}}}


@pytest.fixture
def train(settings: Any, merged: Any, run: Any, tmp_path: Path) -> Callable[..., list[dict[str, float]]]:
    """`train(*changes)`: the metrics of each step of a run with top_p=0.7 and replay."""

    def train(*changes: dict[str, Any]) -> list[dict[str, float]]:
        together = REPLAY
        for each in changes:
            together = merged(together, each)
        return run(settings(tmp_path / "run", together))

    return train


@pytest.mark.first_case
@pytest.mark.parametrize(
    "kind",
    [
        *KINDS,
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in FULL_KINDS),
    ],
)
def test_trainer_log_probs_match_sampling_log_probs(train: Any, kind: str):
    """Within the rounding of float32. (In asynchronous training weights are a step older, by a tiny step.)"""
    mean, largest = (1e-4, 1e-3) if kind == "asynchronous" else (2e-6, 2e-5)
    for step in train(SLOWLY, (KINDS | SLOW_KINDS | FULL_KINDS)[kind]):
        assert step["policy/rollout_train_logprobs_abs_diff_mean"] < mean
        assert step["policy/rollout_train_logprobs_abs_diff_max"] < largest
        assert step["policy/first_ratio_max_deviation"] == 0
        assert step["policy/grad_norm"] > 0
        assert 1 < step["generate/kept_tokens_mean"] < step["generate/kept_tokens_max"] <= 40


@pytest.mark.slow
def test_full_vocabulary_log_probs_differ_by_truncated_mass(train: Any, monkeypatch: pytest.MonkeyPatch):
    """The same rollouts, of which the trainer is not told the kept tokens: log 0.7 a token (-0.36) or below, as the 40
    likeliest are chosen first."""
    collate = collate_module.collate

    def without_kept(*args: Any, **kwargs: Any) -> TrainingInputBatch:
        batch = collate(*args, **kwargs)
        del batch["kept_counts"], batch["kept_ids"]
        return batch

    monkeypatch.setattr("skyrl_train.trainer.collate", without_kept)
    for step in train(SLOWLY):
        assert step["policy/rollout_train_logprobs_abs_diff_mean"] > 0.36
        assert step["policy/rollout_train_ratio_mean"] < 0.7


def test_kept_tokens_shifted_by_token_end_run(train: Any, monkeypatch: pytest.MonkeyPatch):
    own = KeptTokens.of

    def shifted(sets: Any) -> KeptTokens:
        return own([*sets[1:], *sets[:1]])

    monkeypatch.setattr(KeptTokens, "of", shifted)
    with pytest.raises(Exception, match="is not among the tokens that it was sampled from"):
        train()


@pytest.mark.slow
def test_reference_log_probs_are_renormalized(train: Any):
    """Before the first update policy and reference are the same, so their divergence is 0; over the vocabulary it would
    be the mass that was cut."""
    kl = {"trainer": {"algorithm": {"use_kl_loss": True}, "policy_mini_batch_size": 4}}
    first, _ = train(SLOWLY, kl)
    assert first["policy/policy_kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"generator": {"backend": "vllm"}},
            r"generator\.backend=vllm",
        ),
        (
            {"generator": {"run_engines_locally": False, "remote_inference_engine_urls": ["127.0.0.1:1"]}},
            "external servers",
        ),
        ({"generator": {"sampling_params": {"top_k": -1}}}, r"sampling_params\.top_k=-1"),
        ({"generator": {"sampling_params": {"repetition_penalty": 1.1}}}, r"repetition_penalty=1\.1"),
        ({"trainer": {"strategy": "megatron"}}, r"trainer\.strategy=fsdp2"),
        (
            {"generator": {"chat_template": {"name_or_path": "qwen3_with_thinking"}}},
            "tokenized again in each turn",
        ),
    ],
)
def test_settings_without_kept_tokens_are_refused(
    settings: Any, merged: Any, tmp_path: Path, changes: dict[str, Any], message: str
):
    apart = {"trainer": {"placement": {"launcher": "ray", "colocate_all": False}}}
    with pytest.raises(ConfigError, match=message):
        validate_cfg(settings(tmp_path, merged(merged(REPLAY, apart), changes)))


def test_replay_starts_new_journal(train: Any, tmp_path: Path):
    """Groups that a run without replay left in the journal have no kept tokens: with it they are generated again."""
    journal = tmp_path / "run" / "rollouts" / "journal.jsonl"
    resumable = ASYNCHRONOUS | {"trainer": {**ASYNCHRONOUS["trainer"], "ckpt_interval": 1, "max_training_steps": 1}}
    train(resumable, {"trainer": {"policy": {"sampling_mask_replay": False}}})
    before = json.loads(journal.read_text().splitlines()[0])["experiment"]
    steps = train(resumable, {"trainer": {"max_training_steps": 2}})
    assert [step["step"] for step in steps] == [1, 2]
    assert json.loads(journal.read_text().splitlines()[0])["experiment"] == before | {
        "trainer.policy.sampling_mask_replay": True,
    }
