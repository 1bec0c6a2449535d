"""Runs that replay the routes of a mixture of experts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import asynchronous

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.config.validation import validate_cfg
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import ConfigError
from skyrl_train.rollouts import collate as collate_module
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_models import build_character_tokenizer
from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments


@pytest.fixture(scope="module")
def chat_mixture(save_mixture: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mixture of eight experts, two of them for each token, with a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("models") / "chat_mixture"
    tokenizer = build_character_tokenizer()
    tokenizer.save_pretrained(folder)
    return save_mixture(folder, scale=3.0, num_experts=8, vocab_size=len(tokenizer), max_position_embeddings=256)


class RewritesAnswers(DifferentCharacters):
    """Environment that keeps a beginning of the first answer, replaces the second by its own words, and takes the third
    as it is.
    """

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        kept = [action[: len(action) // 2], "no", action][self.turns - 1]
        done = self.turns == 3
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": "go on"}],
            reward=self.reward(action),
            done=done,
            metadata={},
            postprocessed_action=kept,
        )


@pytest.fixture
def run_mixture(settings: Any, merged: Any, chat_mixture: str, tmp_path: Path) -> Iterator[Any]:
    """`run_mixture(changes)`: the metrics of each step of a run of the mixture."""

    def run(changes: dict[str, Any]) -> list[dict[str, float]]:
        policy = {"model": {"path": chat_mixture}, "optimizer_config": {"lr": 3e-2}}
        cfg = settings(tmp_path / "run", merged({"trainer": {"policy": policy}}, changes))
        BasePPOExp(cfg).run()
        return RunFolder(cfg.trainer.run_dir).read_metrics()

    with register_environments(rewrites_answers=RewritesAnswers):
        yield run


@pytest.mark.first_case
@pytest.mark.parametrize("bf16", [False, True])
def test_r2_trains_second_update_on_routes_of_first(run_mixture: Any, bf16: bool):
    """Two large optimizer steps: the second would choose other experts, and replays those of the start."""
    first, second = run_mixture({"trainer": {"policy": {"routing_replay": "R2"}, "bf16": bf16}})
    for step in (first, second):
        assert 0.001 < step["policy/replayed_routes_differing"] < 0.5
        assert step["policy/ratio_alarms"] == 0
        assert step["policy/grad_norm"] > 0


R3 = {"trainer": {"policy": {"routing_replay": "R3"}}}
ONE_UPDATE = {"trainer": {"policy_mini_batch_size": 4}}
CONVERSATION = {
    "environment": {"env_class": "up_to_three_turns"},
    "generator": {"max_turns": 3, "use_conversation_multi_turn": True},
}
STEP_WISE = {**CONVERSATION, "generator": {**CONVERSATION["generator"], "step_wise_trajectories": True}}
JOINED = {**STEP_WISE, "generator": {**STEP_WISE["generator"], "merge_stepwise_output": True}}
ASYNCHRONOUS = {"trainer": asynchronous(max_staleness_steps=1)}
KINDS = {
    "one turn": {},
    "turns as rows": STEP_WISE,
    "answers rewritten": {**CONVERSATION, "environment": {"env_class": "rewrites_answers"}},
    "asynchronous": ASYNCHRONOUS,
    "megatron": {"trainer": {"strategy": "megatron"}},
}
SLOW_KINDS = {
    "turns": CONVERSATION,
    "turns joined": JOINED,
    "form one message": {
        **CONVERSATION,
        "generator": {**CONVERSATION["generator"], "use_conversation_multi_turn": False},
    },
    "padded": {"trainer": {"use_sample_packing": False}},
}


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)])
def test_r3_replays_routes_at_matching_positions(run_mixture: Any, merged: Any, kind: str):
    """Engine and trainer compute the same in float32: what is replayed is what the trainer would choose. Routes of
    other places are others: see the next test. (In asynchronous training weights are a step older, by a tiny step.)"""
    slowly = {"trainer": {"policy": {"optimizer_config": {"lr": 1e-6}}}}
    for step in run_mixture(merged(merged(merged(R3, ONE_UPDATE), slowly), (KINDS | SLOW_KINDS)[kind])):
        assert step["policy/replayed_routes_differing"] < 1e-3
        assert step["policy/grad_norm"] > 0
        assert step["policy/ratio_alarms"] == 0


@pytest.mark.slow
def test_r3_metric_detects_routes_shifted_by_token(run_mixture: Any, merged: Any, monkeypatch: pytest.MonkeyPatch):
    aligned = collate_module.pad_routes

    def shifted(*args: Any) -> Any:
        routes = aligned(*args)
        assert routes is not None
        return routes.roll(1, dims=1)

    monkeypatch.setattr(collate_module, "pad_routes", shifted)
    for step in run_mixture(merged(R3, ONE_UPDATE)):
        assert step["policy/replayed_routes_differing"] > 0.2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"generator": {"backend": "vllm"}}, "generator.backend=vllm"),
        (
            {"generator": {"run_engines_locally": False, "remote_inference_engine_urls": ["127.0.0.1:1"]}},
            "external servers",
        ),
        (
            {"generator": {"chat_template": {"name_or_path": "qwen3_with_thinking"}}},
            "tokenized again in each turn",
        ),
    ],
)
def test_r3_is_refused_without_routes_of_every_token(
    settings: Any, merged: Any, tmp_path: Path, changes: Any, message: str
):
    apart = {"trainer": {"placement": {"launcher": "ray", "colocate_all": False}}}
    with pytest.raises(ConfigError, match=message):
        validate_cfg(settings(tmp_path, merged(merged(R3, apart), changes)))


def test_dense_model_is_refused(settings: Any, merged: Any, tmp_path: Path):
    with pytest.raises(Exception, match="routing_replay=R2"):
        BasePPOExp(settings(tmp_path, {"trainer": {"policy": {"routing_replay": "R2"}}})).run()


@pytest.mark.slow
def test_r3_starts_new_journal(run_mixture: Any, merged: Any, tmp_path: Path):
    """Groups that a run without replay left in the journal have no routes: with R3 they are generated again."""
    journal = tmp_path / "run" / "rollouts" / "journal.jsonl"

    def first_line() -> dict[str, Any]:
        return json.loads(journal.read_text().splitlines()[0])["experiment"]

    resumable = merged(ASYNCHRONOUS, {"trainer": {"ckpt_interval": 1}})
    run_mixture(merged(resumable, {"trainer": {"max_training_steps": 1}}))
    before = first_line()
    steps = run_mixture(merged(merged(resumable, R3), {"trainer": {"max_training_steps": 3}}))
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert first_line() == before | {"trainer.policy.routing_replay": "R3"}
