"""Training rows that skyrl-train makes of trajectories: failures, several rows of one, advantages."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import drawers
import pytest

from skyrl_agent.chat.transitions import Observation, TokensWithLogprobs, Transition
from skyrl_agent.integrations.skyrl_train.skyrl_train_backend import (
    SkyRLAgentGenerator,
    SkyRLBackend,
    build_generator_output,
    build_instance_rows,
    build_rollout_batch,
)
from skyrl_agent.testing import byte_tokenizer
from skyrl_agent.training_rows import compute_trajectory_advantages, repeat_for_rows, training_rows
from skyrl_agent.types import Failure, TrajectoryResult
from skyrl_train.batch_preparation import prepare_training_batch
from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import WorkerError
from skyrl_train.generators.base import GeneratorInput, TrajectoryID
from skyrl_train.generators.inputs import prepare_generator_input
from skyrl_train.inference_engines.base import Completion
from skyrl_train.rollouts.adapter import to_generator_output, to_rollout_batch
from skyrl_train.rollouts.collate import collate
from skyrl_train.rollouts.faults import record_faults


def result(reward: float | None, *turns: tuple[list[int], list[int]], reason: str = "FINISH") -> TrajectoryResult:
    transitions = [
        Transition(Observation(read), TokensWithLogprobs(wrote, [-0.5] * len(wrote), weight_versions=[3] * len(wrote)))
        for read, wrote in turns
    ]
    failure = None if reward is not None else Failure("generate", "infrastructure", "no engine")
    return TrajectoryResult(transitions=transitions, reward=reward, finish_reason=reason, failure=failure)


GROUPS = [
    [
        result(1.0, ([5, 6], [7]), ([5, 6, 7, 8], [9, 10])),
        result(0.0, ([5, 6], [7]), ([11], [12]), ([11, 12, 13], [14])),  # it rewrote its history
        result(None, reason="error_runtime"),
    ],
    [
        result(0.5, ([5], [6])),
        result(0.25, ([5], [7, 8]), reason="max_iterations_reached"),
        result(1.0, ([5], [9])),
    ],
]


def test_rows_pass_trainer_checks_and_share_trajectory_advantage():
    rows = training_rows(GROUPS, 100)
    ids = [TrajectoryID(uid, n) for uid in ("0", "1") for n in range(3)]
    rollouts = build_rollout_batch(rows, ids)
    assert record_faults(rollouts) == rollouts
    assert to_rollout_batch(to_generator_output(rollouts), ids) == rollouts
    assert [len(trajectory.samples) for trajectory in rollouts.trajectories] == [1, 2, 1, 1, 1, 1]
    assert [sample.reward for *_, sample in rollouts.rows()] == [1.0, 0.0, 0.0, 0.0, 0.5, 0.25, 1.0]
    batch = collate(rollouts, SimpleNamespace(pad_token_id=0), step=1)  # type: ignore[arg-type]
    cfg = SkyRLConfig.from_dict({"trainer": {"algorithm": {"advantage_estimator": "rloo", "use_kl_loss": False}}})
    judged, metrics = prepare_training_batch(batch, cfg, 0.0)
    found = [row[0].item() for row in judged.tensor("advantages")]
    assert found == pytest.approx(repeat_for_rows(rows, compute_trajectory_advantages(rows, "leave_one_out")))
    assert found == pytest.approx([1.0, -1.0, -1.0, 0.0, -0.125, -0.5, 0.625])
    assert judged.tensor("loss_mask").sum(dim=1).tolist() == [3, 1, 2, 0, 1, 0, 1]
    assert metrics["loss/avg_final_rewards"] == pytest.approx(2.75 / 5)


def test_output_reports_failures_and_weight_versions():
    output = build_generator_output(training_rows(GROUPS, 100))
    failures = output["failures"]
    assert failures is not None and [failure is not None for failure in failures] == [False] * 3 + [True] + [False] * 3
    assert failures[3].kind == "infrastructure" and failures[3].message == "generate: no engine"
    assert output["weight_versions"] == [[3, -1, 3, 3], [3], [3, -1, 3], [-1], [3], [3, 3], [3]]
    assert output["rollout_metrics"]["generate/num_failed/infrastructure"] == 1
    assert output["rollout_metrics"]["rollout_metrics/error_runtime"] == pytest.approx(1 / 6)


def test_samples_of_prompt_share_instance_row():
    prompts = [
        {"prompt": [{"role": "user", "content": text}], "env_class": None, "env_extras": {"answer": text}, "uid": uid}
        for uid, text in (("0", "a"), ("1", "a"))
    ]
    batch, _ = prepare_generator_input(prompts, 3, None, None, "train", 1)
    rows = build_instance_rows(batch)
    assert [(row["prompt"][0]["content"], row["answer"]) for row in rows] == [("a", "a"), ("a", "a")]


class ListeningEngine:
    """Engine that notes the sessions which are announced, and those of the requests that follow."""

    def __init__(self) -> None:
        self.announcements: list[Any] = []
        self.sessions: list[str] = []

    @contextmanager
    def announced(self, groups: Any) -> Iterator[None]:
        assert not self.sessions
        self.announcements.append(groups)
        yield

    async def generate(self, request: Any) -> Any:
        self.sessions.append(request.session_id)
        return Completion([65], "stop", [1], [0.0])


async def test_batch_sessions_match_agent_request_sessions(tmp_path: Path):
    path, engine = tmp_path / "task.yaml", ListeningEngine()
    path.write_text(json.dumps(drawers.task()))
    cfg = SkyRLConfig.from_dict({"generator": {"task": str(path), "n_samples_per_prompt": 2}}).generator
    generator = SkyRLAgentGenerator(cfg, engine, byte_tokenizer())  # type: ignore[arg-type]
    prompts = [
        {"prompt": row["prompt"], "env_class": None, "env_extras": row, "uid": row["thing"]}
        for row in drawers.rows()[:2]
    ]
    await generator.generate(prepare_generator_input(prompts, 2, None, None, "train", 1)[0])
    [groups] = engine.announcements
    assert [len(group) for group in groups] == [2, 2]
    assert {session for group in groups for session in group} == set(engine.sessions) and len(set(engine.sessions)) == 4


class DyingEngine(ListeningEngine):
    """Answers nobody: it died."""

    async def generate(self, request: Any) -> Any:
        raise WorkerError("the engine died; its log says why")


async def test_permanent_engine_failure_ends_batch(tmp_path, slow_agent):
    path = tmp_path / "task.yaml"
    path.write_text(f"agent_cls: {slow_agent}\ntask: drawers.Drawers\n")
    cfg = SkyRLConfig.from_dict({"generator": {"task": str(path), "n_samples_per_prompt": 1}}).generator
    generator = SkyRLAgentGenerator(cfg, DyingEngine(), byte_tokenizer())  # type: ignore[arg-type]
    assert isinstance(generator.runner.infer_engine, SkyRLBackend)
    extras = [{"drawer": "a", "thing": thing} for thing in ("asks", "sleeps")]
    batch = GeneratorInput(prompts=[[{"role": "user", "content": "a"}]] * 2, env_classes=["", ""], env_extras=extras)
    async with asyncio.timeout(20):
        with pytest.raises(WorkerError, match="the engine died"):
            await generator.generate(batch)
