"""Calls as SkyRL's own tests and its users' code make them."""

import json
import sys

import pytest

import skyrl_gym
from skyrl_gym.envs.lcb.livecodebench import compute_score, extract_code_from_model, run_test
from skyrl_gym.envs.search.env import SearchEnvConfig
from skyrl_gym.envs.searchcode.env import SearchCodeEnvConfig
from skyrl_gym.error import TaskError
from skyrl_gym.tools.search import SearchToolGroup

from .sandboxed import sandboxed

NEEDS_KEY = "llm_as_a_judge"
ROW = {"reward_spec": {"method": "rule", "ground_truth": "42"}}


def example_of(env_id):
    return skyrl_gym.envs.registration.env_class_of(skyrl_gym.spec(env_id)).examples()[0]


@pytest.mark.parametrize("env_id", sorted(set(skyrl_gym.registry) - {NEEDS_KEY}))
def test_environment_settings_accept_env_class(env_id):
    example = example_of(env_id)
    env = skyrl_gym.make(env_id, env_config=dict(example.env_config) | {"env_class": env_id}, extras=example.extras)
    env.close()


def test_other_unknown_settings_are_still_refused():
    with pytest.raises(ValueError, match="env_clas"):
        skyrl_gym.make("searchcode", env_config={"env_clas": "searchcode"}, extras=ROW)


def skyrl_search_api(retrieval_service_url, query, topk=3, return_scores=True, timeout=30, log_requests=True, session=None):  # noqa: E501 # fmt: skip
    return {"result": [[{"document": {"contents": f"{query} {topk}"}, "score": 1.0}]]}, None


@pytest.mark.parametrize("env_id, call", [("search", "<search>cats</search>"), ("searchcode", "<tool><search>cats</search></tool>")])  # noqa: E501 # fmt: skip
def test_search_stand_in_with_skyrl_s_signature_is_called(monkeypatch, env_id, call):
    monkeypatch.setattr("skyrl_gym.tools.search.call_search_api", skyrl_search_api)
    env = skyrl_gym.make(env_id, env_config={}, extras=example_of(env_id).extras)
    assert "cats 3" in env.step(call)["observations"][0]["content"]


@pytest.mark.parametrize("config_class", [SearchEnvConfig, SearchCodeEnvConfig])
def test_retry_window_reaches_search_call_when_set(monkeypatch, config_class):
    given = {}

    def record(retrieval_service_url, query, **arguments):
        given.update(arguments)
        return {"result": []}, None

    monkeypatch.setattr("skyrl_gym.tools.search.call_search_api", record)
    SearchToolGroup(retry_seconds=config_class(retry_seconds=7).retry_seconds).search("cats")
    assert given["retry_seconds"] == 7


@pytest.mark.parametrize("env_id", ["text2sql", "searchcode"])
@pytest.mark.parametrize(
    "turns, action, done",
    [(1, "<solution>1</solution>", True), (1, "<solution>", False), (2, "anything", True), (1, "anything", False)],
)
def test_is_done_hook_depends_on_turns_and_solution(env_id, turns, action, done):
    example = example_of(env_id)
    env = skyrl_gym.make(env_id, env_config=example.env_config, extras=example.extras | {"max_turns": 2})
    env.turns = turns
    assert env._is_done(action) is done


@pytest.mark.parametrize("env_id", ["text2sql", "searchcode"])
def test_is_done_hook_of_subclass_ends_episode(env_id):
    class StopsAtOnce(skyrl_gym.envs.registration.env_class_of(skyrl_gym.spec(env_id))):
        def _is_done(self, action):
            return "stop" in action

    example = example_of(env_id)
    env = StopsAtOnce(env_config=example.env_config, extras=example.extras | {"max_turns": 9})
    assert env.step("please stop")["done"]


# LiveCodeBench's functions

ADD = "a, b = map(int, input().split())\nprint(a + b)"
TESTS = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": "2 2", "output": "4", "testtype": "stdin"},
]
SAMPLE = {"input_output": json.dumps({"inputs": ["1 2", "2 2"], "outputs": ["3", "4"]})}
FUNCTION = {"input_output": json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"})}


def test_extract_code_from_model_returns_last_block():
    assert extract_code_from_model("```python\n1\n```\n```py\n 2 \n```") == "2"
    assert extract_code_from_model("no code") is None


@sandboxed
def test_compute_score_returns_code_and_reward():
    text = f"```python\n{ADD}\n```"
    assert compute_score(text, TESTS) == (ADD, 1.0)
    assert compute_score(text.replace("+", "-"), json.dumps(TESTS)) == (ADD.replace("+", "-"), 0.0)
    assert compute_score("no code", TESTS) == (None, 0.0)


@sandboxed
@pytest.mark.parametrize(
    "sample, code, results",
    [
        (SAMPLE, ADD, [True, True]),
        (SAMPLE, "print(3)", [True, -2]),
        (SAMPLE, "while True: pass", [-3]),
        (SAMPLE, "1 / 0", [-4]),
        (SAMPLE, "1 +", [-4]),
        (FUNCTION, "def add(a, b): return a + b", [True]),
        (FUNCTION, "class Solution:\n    def add(self, a, b): return a - b", [-2]),
    ],
)
def test_run_test_returns_codes_up_to_first_failure(sample, code, results):
    codes, metadata = run_test(sample, code, timeout=2)
    assert codes == results
    assert metadata.get("error_code") == (None if results[-1] is True else results[-1])


def test_run_test_rejects_malformed_sample():
    with pytest.raises(TaskError, match="number of inputs and outputs"):
        run_test({"input_output": json.dumps({"inputs": ["1"], "outputs": []})}, ADD)


# Environments by "module:Class"


@pytest.fixture
def own_env_module(tmp_path, monkeypatch):
    (tmp_path / "my_environments.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv\n"
        "class Guess(BaseTextEnv):\n"
        "    def __init__(self, env_config=None, extras=None):\n"
        "        super().__init__()\n"
        "    def step(self, action):\n"
        "        return {'observations': [], 'reward': float(action == 'yes'), 'done': True}\n"
        "    @staticmethod\n"
        "    def aggregate_metrics(metrics):\n"
        "        return {'episodes': len(metrics)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_environments"
    sys.modules.pop("my_environments", None)


def test_environment_is_made_by_module_and_class_without_registration(own_env_module):
    env_id = f"{own_env_module}:Guess"
    assert skyrl_gym.make(env_id).step("yes")["reward"] == 1.0
    assert skyrl_gym.spec(env_id).id == env_id
    assert skyrl_gym.metrics.aggregate_for_environment(env_id, [{}, {}]) == {"episodes": 2}
    assert env_id not in skyrl_gym.registry


@pytest.mark.parametrize(
    "env_id, says", [("my_environments:Ges", "no attribute 'Ges'"), ("nowhere:Guess", "No module named 'nowhere'")]
)
def test_wrong_module_or_class_is_named(own_env_module, env_id, says):
    with pytest.raises(skyrl_gym.error.Error, match=rf"No registered env with id: {env_id}.*{says}"):
        skyrl_gym.make(env_id)
