"""Runs whose models compute log-probs and values of finished groups while others are generated."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from async_runs import APART, CORRECTED, assert_equal_runs

from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.errors import WorkerError
from skyrl_train.rollouts.types import RolloutBatch
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.training_backends.transformers_backend import TransformersBackend
from skyrl_train_testing.tiny_runs import DifferentCharacters, register_environments


class LateForOnePrompt(DifferentCharacters):
    """Environment that takes its time for one prompt of each four."""

    seconds = 0.4
    num_late = 0
    """Answers to that prompt."""

    def init(self, prompt: Any) -> Any:
        self.number = int(prompt[-1]["content"].split()[-1])
        return super().init(prompt)

    async def step(self, action: str) -> Any:
        if self.number % 4 == 1:
            await asyncio.sleep(self.seconds)
            type(self).num_late += 1
        return super().step(action)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with register_environments(late_for_one_prompt=LateForOnePrompt):
        yield


LATE = {"environment": {"env_class": "late_for_one_prompt"}}
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1}
THREE_MODELS = {
    "algorithm": {**REFERENCE, "advantage_estimator": "gae"},
    "critic_mini_batch_size": 2,
    "hf_save_interval": 2,
}
ASYNCHRONOUS = {
    **APART,
    "algorithm": {**REFERENCE, **CORRECTED},
    "max_training_steps": 3,
    "hf_save_interval": 3,
    "fully_async": {"enabled": True, "max_staleness_steps": 0, "order": "exact"},
}
FILTERED = {"algorithm": {**REFERENCE, "dynamic_sampling": {"type": "filter"}}, "hf_save_interval": 2}
KEPT_TOKENS = {"policy": {"sampling_mask_replay": True}}


@pytest.mark.first_case
@pytest.mark.parametrize(
    "trainer",
    [
        THREE_MODELS,
        ASYNCHRONOUS,
        pytest.param(FILTERED, marks=pytest.mark.slow),
        pytest.param(THREE_MODELS | {"max_tokens_per_microbatch": 200}, marks=pytest.mark.slow),
        pytest.param(THREE_MODELS | KEPT_TOKENS, marks=pytest.mark.slow),
    ],
    ids=["models", "asynchronous", "dynamic sampling", "token budget", "kept tokens"],
)
def test_run_with_early_forwards_is_bitwise_equal_to_run_without(
    settings: Any, merged: Any, run: Any, chat_model: str, tmp_path: Path, monkeypatch: Any, trainer: dict[str, Any]
):
    changes = merged(LATE, {"trainer": trainer})
    if "critic_mini_batch_size" in trainer:
        changes = merged(changes, {"trainer": {"critic": {"model": {"path": chat_model}}}})
    if "policy" in trainer:
        changes = merged(changes, {"generator": {"sampling_params": {"top_k": 4, "logprobs": 0}}})
    forwards: list[str] = []
    score = TransformersBackend.score

    def counted(self: TransformersBackend, *args: Any, **kwargs: Any) -> Any:
        forwards.append(self.name)
        return score(self, *args, **kwargs)

    monkeypatch.setattr(TransformersBackend, "score", counted)
    early = settings(tmp_path / "early", changes)
    rows = run(early)
    assert sum(row["generate/forward_seconds"] for row in rows) > 0
    num_early = len(forwards)
    monkeypatch.setattr(RayPPOTrainer, "_can_compute_early", lambda *_: False)
    late = settings(tmp_path / "late", changes)
    assert all("generate/forward_seconds" not in row for row in run(late))
    assert_equal_runs(early, late)
    assert len(forwards) == 2 * num_early, "nothing is computed twice"


def test_early_forward_error_ends_run_and_generation(
    settings: Any, merged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def failing(self: TransformersBackend, *_: Any, **__: Any) -> Any:
        raise KeyError("my bug")

    monkeypatch.setattr(LateForOnePrompt, "seconds", 60.0)
    monkeypatch.setattr(TransformersBackend, "score", failing)
    LateForOnePrompt.num_late = 0
    with pytest.raises(WorkerError, match=r"ref worker 0 .*KeyError: 'my bug'"):
        BasePPOExp(settings(tmp_path, merged(LATE, {"trainer": {"algorithm": REFERENCE}}))).run()
    assert LateForOnePrompt.num_late == 0, "its answer was not waited for"


def test_early_forwards_are_disabled_with_custom_filter(
    settings: Any, merged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    score = TransformersBackend.score

    def recorded(self: TransformersBackend, *args: Any, **kwargs: Any) -> Any:
        order.append(self.name)
        return score(self, *args, **kwargs)

    class Filtering(RayPPOTrainer):
        def check_rollouts(self, rollouts: RolloutBatch) -> RolloutBatch:
            order.append("filter")
            return super().check_rollouts(rollouts)

    class FilteringExp(BasePPOExp):
        def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
            return Filtering(*args, **kwargs)

    monkeypatch.setattr(TransformersBackend, "score", recorded)
    FilteringExp(settings(tmp_path, merged(LATE, {"trainer": {"algorithm": REFERENCE, "max_training_steps": 1}}))).run()
    assert order[0] == "filter" and "ref" in order
