import json

import pytest

import skyrl_gym
from skyrl_gym.envs.searchcode.env import SearchCodeEnv, SearchCodeEnvConfig
from skyrl_gym.error import InfraError, TaskError

from .sandboxed import sandboxed

NOBODY = "http://127.0.0.1:9/retrieve"


def make(max_turns=3, ground_truth="42", **env_config) -> SearchCodeEnv:
    settings = {"search_url": NOBODY, "retry_seconds": 0.1} | env_config
    extras = {"reward_spec": {"ground_truth": ground_truth}, "max_turns": max_turns}
    env = skyrl_gym.make("searchcode", env_config=settings, extras=extras)
    assert isinstance(env, SearchCodeEnv)
    return env


def python(code):
    return f"I compute.\n<tool><python>{code}</python></tool>"


@sandboxed
@pytest.mark.parametrize("code, printed", [("print('hello world')", "hello world"), ("print(1 + 1)", "2")])
def test_program_output_is_observed(code, printed):
    with make() as env:
        output = env.step(python(code))
    assert output["observations"] == [{"role": "user", "content": printed}]
    assert (output["reward"], output["done"]) == (0.0, False)
    assert output["metadata"] == {
        "tool_group": "PythonCodeExecutorToolGroup",
        "tool_name": "python",
        "tool_input": [code],
        "tools": [["search"], ["python"]],
    }


@sandboxed
def test_program_error_is_observed_and_tool_output_earns_zero():
    with make(max_turns=4) as env:
        (message,) = env.step(python("print(undefined)"))["observations"]
        assert message["content"].startswith("Error executing Python code: Traceback (most recent call last):")
        assert message["content"].endswith("NameError: name 'undefined' is not defined")
        assert env.step(python("x = 1"))["observations"] == []  # a tool that says nothing
        (message,) = env.step(python("print('#' * 4, 42)"))["observations"]
        assert message["content"] == "#### 42"
        assert env.step("<solution>as above</solution>")["reward"] == 0.0


@pytest.mark.parametrize(
    "action, parsed",
    [
        ("<tool><python>print(1)</python></tool>", ("PythonCodeExecutorToolGroup", "python", ["print(1)"])),
        ("<tool> <search> a b </search> </tool>", ("SearchToolGroup", "search", ["a b"])),
        ("<tool><search>a</search></tool><tool><python>b</python></tool>", ("SearchToolGroup", "search", ["a"])),
    ],
)
def test_first_call_is_executed(action, parsed):
    assert make()._parse_action(action) == parsed


@pytest.mark.parametrize(
    "action, says",
    [
        ("I think.", "No <tool>...</tool> block"),
        ("<tool><python>print(1)</python>", "No <tool>...</tool> block"),
        ("<tool>print(1)</tool>", "No valid inner tool tag"),
        ("<tool><python>print(1)</search></tool>", "No valid inner tool tag"),
        ("<tool><browser>x</browser></tool>", "Tool 'browser' not found; there are python, search."),
        ("", "No <tool>...</tool> block"),
    ],
)
def test_malformed_call_error_is_observed(action, says):
    env = make()
    with pytest.raises(ValueError) as mistake:
        env._parse_action(action)
    assert says in str(mistake.value)
    output = env.step(action)
    (message,) = output["observations"]
    assert says in message["content"] and message["role"] == "user"
    assert output["metadata"]["tool_name"] is None and not output["done"]


def test_solution_or_last_turn_ends_episode_and_first_number_counts():
    output = make().step("<solution>#### 42</solution>")
    assert output == {"observations": [], "reward": 1.0, "done": True, "metadata": {}, "truncated": False}
    env = make()
    env.step("It may be #### 41.")
    assert env.step("<solution>#### 42</solution>")["reward"] == 0.0
    assert make().step("<solution>42</solution>")["reward"] == 0.0
    env = make(max_turns=2)
    assert env.step("first")["done"] is False
    last = env.step("#### 42")
    assert last["done"] is True and last["truncated"] is True and last["reward"] == 1.0
    assert env.get_metrics() == {"turns": 2, "tool_calls": 0}


@sandboxed
@pytest.mark.parametrize(
    "format, turn",
    [
        ("hermes", '<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>'),
        ("llama3_json", '{"name": "python", "parameters": {"code": "print(6 * 7)"}}'),
        (
            "gpt_oss",
            '<|channel|>commentary to=functions.python <|constrain|>json<|message|>{"code": "print(6 * 7)"}<|call|>',
        ),
    ],
)
def test_calls_in_native_model_formats(format, turn):
    with make(tool_call_format=format) as env:
        output = env.step(turn)
        assert output["observations"] == [{"role": "tool", "content": "42"}]
        assert output["metadata"]["tool_input"] == ["print(6 * 7)"]
        (message,) = env.step("no call")["observations"]
        assert "No tool call found" in message["content"]


@sandboxed
def test_every_call_of_turn_is_executed():
    calls = [{"name": "python", "arguments": {"code": "print(1)"}}, {"name": "browse", "arguments": {}}]
    turn = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    with make(tool_call_format="hermes") as env:
        first, second = env.step(turn)["observations"]
    assert first["content"] == "1" and "Tool 'browse' not found" in second["content"]


def test_search_returns_documents_or_infra_error():
    with pytest.raises(InfraError, match="Search error"):
        make().step("<tool><search>anything</search></tool>")
    pytest.importorskip("fastapi", reason="needs the retrieval extra")
    pytest.importorskip("bm25s", reason="needs the retrieval extra")
    from skyrl_gym.tools.retrieval import RetrievalServer

    with RetrievalServer(["The bridge of Orin has 17 arches.", "Cats sleep."]) as server:
        env = make(search_url=server.url, topk=1)
        (message,) = env.step("<tool><search>bridge of Orin</search></tool>")["observations"]
    assert json.loads(message["content"])["result"].startswith("Doc 1: The bridge of Orin has 17 arches.")


def test_settings_and_rows_are_checked():
    assert make().max_turns == 3 and SearchCodeEnvConfig().tool_call_format == "xml"
    with pytest.raises(ValueError, match="tool_call_format"):
        make(tool_call_format="json")
    with pytest.raises(ValueError, match="python_timeout"):
        make(python_timeot=3)
    with pytest.raises(TaskError, match="reward_spec"):
        skyrl_gym.make("searchcode", env_config={}, extras={})
