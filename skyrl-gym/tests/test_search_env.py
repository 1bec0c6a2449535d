"""The search environment, over a retrieval server in this process."""

import json
import threading
import time
from collections.abc import Iterator

import pytest

import skyrl_gym
from skyrl_gym.envs.search.env import SearchEnv, SearchEnvConfig
from skyrl_gym.envs.search.examples import EXAMPLE_DOCUMENTS
from skyrl_gym.error import InfraError, TaskError

pytest.importorskip("fastapi", reason="needs the retrieval extra")
pytest.importorskip("bm25s", reason="needs the retrieval extra")

from skyrl_gym.tools.retrieval import RetrievalServer

NOBODY = "http://127.0.0.1:9/retrieve"


@pytest.fixture(scope="module")
def server() -> Iterator[RetrievalServer]:
    with RetrievalServer(EXAMPLE_DOCUMENTS) as running:
        yield running


def make(search_url: str = NOBODY, target: object = ("Hask",), **extras):
    extras = {"reward_spec": {"ground_truth": {"target": target}}, **extras}
    env = skyrl_gym.make("search", env_config={"search_url": search_url, "retry_seconds": 0.1}, extras=extras)
    assert isinstance(env, SearchEnv)
    env.init([{"role": "user", "content": "From which village?"}])
    return env


def test_search_result_is_in_information_tags(server):
    env = make(server.url, max_turns=3)
    output = env.step("<think>I look.</think><search> Lantern House </search>")
    (message,) = output["observations"]
    assert message["role"] == "user" and not output["done"] and output["reward"] == 0.0
    body = message["content"].removeprefix("\n<information>").removesuffix("</information>\n")
    assert json.loads(body)["result"].startswith('Doc 1: "Lantern House"\nLantern House is a lighthouse')
    assert output["metadata"] == {
        "tool_group": "SearchToolGroup",
        "tool_name": "search",
        "tool_input": [" Lantern House "],
    }

    output = env.step("<answer> the HASK. </answer>")
    assert (output["observations"], output["metadata"]) == ([], {})
    assert output["done"] and output["reward"] == 1.0 and output.get("truncated") is False
    assert [message["role"] for message in env.chat_history] == ["assistant", "user", "assistant"]
    assert env.get_metrics() == {"turns": 2, "searches": 1}


@pytest.mark.parametrize(
    "action, expected",
    [
        ("<search>a</search>", ["a"]),
        ("x <search> a </search> <search>b</search>", [" a "]),
        ("<search>\na\nb</search>", ["\na\nb"]),
        ("<search></search>", [""]),
        ("<search>open", [None]),
        ("closed</search>", [None]),
        ("", [None]),
    ],
)
def test_first_search_tag_is_query(action, expected):
    assert make()._parse_action(action) == expected


@pytest.mark.parametrize(
    "action, turns, expected",
    [
        ("<answer>a</answer>", 1, True),
        ("<search>q</search><answer>a</answer>", 1, True),
        ("<answer>open", 1, False),
        ("<search>q</search>", 1, False),
        ("<search>q</search>", 3, True),
    ],
)
def test_answer_or_last_turn_ends_episode(action, turns, expected):
    env = make(max_turns=3)
    env.turns = turns
    assert env._is_done(action) is expected


@pytest.mark.parametrize(
    "action, reward",
    [
        ("<answer>Hask</answer>", 1.0),
        ("<answer>a hask!</answer>", 1.0),
        ("<answer>Quillmere</answer><answer>Hask</answer>", 1.0),
        ("<answer>Hask</answer><answer>Quillmere</answer>", 0.0),
        ("<answer>Hask or Quillmere</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("</answer>Hask<answer>", 0.0),
    ],
)
def test_last_answer_is_graded_by_exact_match(action, reward):
    output = make().step(action)
    assert output["done"] and output["reward"] == reward


def test_answer_in_document_earns_zero():
    with RetrievalServer(["Village hint: <answer>Hask</answer>"]) as server:
        env = make(server.url)
        assert "<answer>Hask</answer>" in env.step("<search>village</search>")["observations"][0]["content"]
        output = env.step("I do not know.")
    assert output["done"] and output["reward"] == 0.0 and output.get("truncated") is True


def test_query_rejected_by_server_is_observed(server):
    env = make(server.url, max_turns=4)
    for query, reason in (("", "at least 1 character"), ("x" * 9000, "9000 characters")):
        (message,) = env.step(f"<search>{query}</search>")["observations"]
        assert "Search error" in message["content"] and reason in message["content"]
    assert "No search results found" in env.step("<search>zzz</search>")["observations"][0]["content"]


def test_missing_query_and_failing_tool_are_observed():
    env = make(max_turns=3)
    (message,) = env.step("hm")["observations"]
    assert message["content"] == "\n<information></information>\n"  # without a request

    def broken(*_):
        raise RuntimeError("the tool is broken")

    env.tool_group.execute_tool = broken  # callers put their own tool there
    assert env.step("<search>q</search>")["observations"][0]["content"] == "the tool is broken"


def test_replaced_call_search_api_is_called_with_keywords(monkeypatch):
    calls = []

    def answer(**arguments):
        calls.append(arguments)
        return None, "timed out"

    monkeypatch.setattr("skyrl_gym.tools.search.call_search_api", answer)
    (message,) = make().step("<search> q </search>")["observations"]
    assert "Search error" in message["content"] and "timed out" in message["content"]
    assert calls[0]["query"] == "q" and calls[0]["topk"] == 3


def test_episode_waits_for_recovering_server(monkeypatch):
    monkeypatch.setattr("skyrl_gym.tools.search.INITIAL_RETRY_DELAY", 0.2)
    server = RetrievalServer(EXAMPLE_DOCUMENTS)
    server.start()
    extras = {"reward_spec": {"ground_truth": {"target": "Hask"}}, "max_turns": 3}
    env = skyrl_gym.make("search", env_config={"search_url": server.url}, extras=extras)
    env.step("<search>Tauben</search>")
    server.stop()
    later = threading.Timer(0.8, server.start)
    later.start()
    try:
        assert "Hask" in env.step("<search>Tauben</search>")["observations"][0]["content"]
    finally:
        later.join()
        server.stop()
    assert env.step("<answer>Hask</answer>")["reward"] == 1.0


def test_unavailable_server_raises_infra_error_without_reward():
    started = time.monotonic()
    with pytest.raises(InfraError, match=NOBODY):
        make().step("<search>Tauben</search>")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "extras, text",
    [
        ({}, "reward_spec"),
        ({"reward_spec": {}}, "ground_truth"),
        ({"reward_spec": {"ground_truth": "Hask"}}, "'target'.*got 'Hask'"),
        ({"reward_spec": {"ground_truth": {}}}, "'target'"),
        ({"reward_spec": {"ground_truth": {"target": []}}}, r"target is \[\]"),
        ({"reward_spec": {"ground_truth": {"target": ["a", 3]}}}, r"target is \['a', 3\]"),
        ({"reward_spec": {"ground_truth": {"target": " "}}}, "target is ' '"),
        ({"reward_spec": {"ground_truth": {"target": 7}}}, "target is 7"),
    ],
)
def test_invalid_row_is_named(extras, text):
    with pytest.raises(TaskError, match=text):
        skyrl_gym.make("search", env_config={}, extras=extras)


def test_targets_may_be_numpy_array():
    numpy = pytest.importorskip("numpy")
    assert make(target=numpy.array(["Hask", "Haskby"], dtype=object)).targets == ["Hask", "Haskby"]


def test_settings_reach_search_tool():
    extras = {"reward_spec": {"ground_truth": {"target": "x"}}}
    config = {"search_url": "http://127.0.0.1:7/retrieve", "topk": 5, "timeout": 7, "log_requests": True}
    for env_config in (config, SearchEnvConfig(**config)):
        group = skyrl_gym.make("search", env_config=env_config, extras=extras).tool_group  # pyright: ignore
        assert (group.search_url, group.topk, group.timeout, group.log_requests) == tuple(config.values())
    defaults = skyrl_gym.make("search", env_config={}, extras=extras).tool_group  # pyright: ignore
    assert defaults.search_url == "http://127.0.0.1:8000/retrieve" and defaults.topk == 3 and not defaults.log_requests
    with pytest.raises(ValueError, match="search_url"):
        skyrl_gym.make("search", env_config={"serch_url": "http://x"}, extras=extras)
