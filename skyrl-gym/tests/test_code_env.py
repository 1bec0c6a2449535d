import json

import pytest

import skyrl_gym
from skyrl_gym.error import InfraError, TaskError
from skyrl_gym.graders.code import CodeSettings

from .sandboxed import sandboxed, without_sandbox

ABSOLUTE = {"tests": ["assert absolute(-2) == 2", "assert absolute(3) == 3"], "entry_point": "absolute"}


def make(ground_truth, **env_config):
    return skyrl_gym.make("code", env_config=env_config, extras={"reward_spec": {"ground_truth": ground_truth}})


def block(code):
    return f"Here it is.\n```python\n{code}\n```"


@sandboxed
@pytest.mark.parametrize("as_text", [False, True], ids=["mapping", "json"])
def test_passing_code_earns_one(as_text):
    env = make(json.dumps(ABSOLUTE) if as_text else ABSOLUTE)
    output = env.step(block("def absolute(x):\n    return x if x > 0 else -x"))
    assert output == {
        "observations": [],
        "reward": 1.0,
        "done": True,
        "metadata": {"parsed_code": "def absolute(x):\n    return x if x > 0 else -x"},
    }
    assert env.get_metrics() == {"outcome_reward": 1.0, "has_code": True, "timed_out": False}
    assert make(ABSOLUTE).step(block("def absolute(x): return x"))["reward"] == 0.0


@sandboxed
def test_programs_are_tested_by_their_output():
    echo = {"tests": [{"input": "a\n", "output": "A"}, {"input": "b\n", "output": "B"}]}
    assert make(echo).step(block("print(input().upper())"))["reward"] == 1.0
    assert make(echo).step(block("print('A')"))["reward"] == 0.0
    half = make(echo, partial_credit=True)
    assert half.step(block("print('A')"))["reward"] == 0.5
    assert half.get_metrics()["outcome_reward"] == 0.0  # credit for a part is not success


@sandboxed
def test_endless_code_earns_zero():
    env = make(ABSOLUTE, case_seconds=0.5)
    assert env.step(block("def absolute(x):\n    while True: pass"))["reward"] == 0.0
    assert env.get_metrics()["timed_out"] is True


def test_response_without_code_block_is_invalid():
    env = make(ABSOLUTE)
    assert env.step("def absolute(x): return abs(x)") == {
        "observations": [],
        "reward": 0.0,
        "done": True,
        "metadata": {"parsed_code": None},
    }
    assert env.get_metrics()["has_code"] is False


@pytest.mark.parametrize(
    "extras, says",
    [
        ({}, "reward_spec"),
        ({"reward_spec": {}}, "ground_truth"),
        ({"reward_spec": {"ground_truth": "assert f()"}}, "must be JSON"),
        ({"reward_spec": {"ground_truth": {"tests": ["assert"]}}}, "test 0 must be Python code"),
    ],
)
def test_malformed_row_is_rejected(extras, says):
    with pytest.raises(TaskError, match=says):
        skyrl_gym.make("code", env_config={}, extras=extras)


def test_invalid_setting_error_names_setting():
    with pytest.raises(ValueError, match="case_seconds"):
        make(ABSOLUTE, case_second=1)
    with pytest.raises(ValueError, match="total_seconds"):
        make(ABSOLUTE, total_seconds=0)
    assert make(ABSOLUTE).settings == CodeSettings()


def test_sandbox_failure_raises_without_reward(monkeypatch):
    without_sandbox(monkeypatch)
    with pytest.raises(InfraError, match="Docker does not run"):
        make(ABSOLUTE).step(block("def absolute(x): return abs(x)"))
