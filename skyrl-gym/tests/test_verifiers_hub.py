"""Environments of verifiers as ours, and ours as theirs, with the real package."""

import json
import sys
from pathlib import Path

import pytest

import skyrl_gym
from skyrl_gym.episode import Episode, run_episode
from skyrl_gym.error import Error, TaskError
from skyrl_gym.hubs.verifiers import VerifiersEnv, verifiers_rows

CALL = '<tool_call>{"name": "shop_price", "arguments": {"item": "tea"}}</tool_call>'


def test_verifiers_rows_are_checked_without_package():
    with pytest.raises(TaskError, match="environment"):
        VerifiersEnv()
    with pytest.raises(TaskError, match="taskset"):
        VerifiersEnv(extras={"environment": {"agent": {}}, "index": 0})
    with pytest.raises(TaskError, match="index"):
        VerifiersEnv(extras={"environment": "gsm8k"})
    with pytest.raises(TaskError, match="hermes"):
        VerifiersEnv({"tool_format": "hermis"}, {"environment": "gsm8k", "index": 0})


def test_verifiers_missing_package_error_names_release(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", None)  # as if it were not installed
    with pytest.raises(Error, match=r"pip install verifiers==0\.4\.0"):
        list(verifiers_rows("gsm8k"))


def test_verifiers_functions_follow_multipart_system_message():
    env = VerifiersEnv(extras={"environment": "gsm8k", "index": 0})
    env._request = {"tools": [{"type": "function", "function": {"name": "shop_price"}}]}
    system = {
        "role": "system",
        "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}],
    }
    first, last = env._with_tools([system, {"role": "user", "content": "tea"}])
    assert first["content"].startswith("Be brief.\nBe kind.\n\nYou can call") and "shop_price" in first["content"]
    assert last["content"] == "tea"


@pytest.fixture
def tasksets(monkeypatch):
    """Tasksets `hub_sums` and `hub_shop`, as if they were installed."""
    pytest.importorskip("verifiers.v1", reason="needs verifiers 0.4")
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder)  # tool servers are processes


def made(row):
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return skyrl_gym.make(row["env_class"], extras=columns)


@pytest.mark.full
def test_verifiers_environments_play_unmodified(tasksets):
    """One turn with two rewards and a metric; a tool server; limits; mistakes."""
    rows = list(verifiers_rows("hub_sums", size=2, start=1))
    assert [row["index"] for row in rows] == [1, 2]
    assert rows[0]["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    result = run_episode(made(rows[0]), rows[0]["prompt"], lambda _: "2 and more")
    assert result.rewards == [0.0]
    result = run_episode(made(rows[0]), rows[0]["prompt"], lambda _: "2")
    assert (result.rewards, result.done, result.truncated) == ([1.5], True, False)
    assert result.metrics == {
        "turns": 1,
        "outcome_reward": 1.5,
        "reward/right": 1.0,
        "reward/short": 1.0,
        "length": 1.0,
    }

    (row, _) = verifiers_rows("hub_shop")
    result = run_episode(made(row), row["prompt"], lambda messages: "3" if messages[-1]["role"] == "tool" else CALL)
    assert result.rewards == [0.0, 1.0]
    assert '"name": "shop_price"' in result.messages[0]["content"]
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["3"]

    limited = json.dumps({"taskset": {"id": "hub_shop"}, "agent": {"max_turns": 2}})
    (row, _) = verifiers_rows(limited)
    result = run_episode(made(row), row["prompt"], lambda _: CALL)
    assert (len(result.rewards), result.truncated) == (2, True)

    with pytest.raises(TaskError, match="index"):
        made({**rows[0], "index": 4}).init([])
    with pytest.raises(Error, match="no_such_taskset"):
        list(verifiers_rows("no_such_taskset"))
    abandoned = made(rows[0])
    abandoned.init([])
    abandoned.close()


@pytest.mark.full
def test_skyrl_gym_environment_works_as_verifiers_environment(tasksets):
    """Ours, exported to verifiers, played through our own adapter: rewards and messages come back the same."""
    (row,) = verifiers_rows({"taskset": {"id": "skyrl_gym_verifiers", "env_id": "multiply"}}, size=1)
    example = skyrl_gym.envs.registration.env_class_of(skyrl_gym.spec("multiply")).examples()[0]
    result = run_episode(made(row), row["prompt"], lambda _: example.oracle[0])
    assert result.total_reward == 1.0 and result.messages[0] == example.prompt[0]
    with Episode(made(row)) as episode:
        episode.init([])
        assert not episode.step("I do not know")["done"]
