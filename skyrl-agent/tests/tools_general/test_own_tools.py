"""Tools and agents of users, from a task file alone: dotted paths, imports, tool groups, MCP servers."""

import functools
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # for the user's module beside this file

from skyrl_agent.auto import AutoAgentRunner
from skyrl_agent.config.task_file import read_task
from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.integrations.base import BACKEND_REGISTRY, Backend, plain_rows, published_output, register_backend
from skyrl_agent.testing import ScriptedModel, byte_tokenizer
from skyrl_agent.tools import TOOL_REGISTRY
from skyrl_agent.tools.base import ToolContext
from skyrl_agent.tools.factory import make_tools
from skyrl_agent.tools.foreign import close_groups

MODULE = "own_agent_tools"
SERVER = {"command": [sys.executable, str(Path(__file__).parent / f"{MODULE}.py")]}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    register_backend("scripted", Backend(lambda infer_engine, **_: infer_engine, plain_rows, published_output))
    yield
    close_groups()
    TOOL_REGISTRY.pop("own_reverse_published", None)
    sys.modules.pop(MODULE, None)
    BACKEND_REGISTRY.pop("scripted", None)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def task(tools: list[Any], **keys: Any) -> dict[str, Any]:
    generator = {
        "infer_backend": "scripted",
        "max_iterations": 20,
        "tool_format": "hermes",
        "max_prompt_length": 50_000,
    }
    return {
        "task": f"{MODULE}.Anything",
        "tools": tools,
        "generator": generator,
        **keys,
    }


async def test_task_file_loads_custom_tools_and_agent(tmp_path):
    """A plain tool that blocks, one in published style, a tool group and a real MCP server over stdio. The errors of
    each reach the model as results of the call."""
    pytest.importorskip("mcp")
    tools = [
        f"{MODULE}.CountWords",
        "own_reverse_published",
        {f"{MODULE}.Scales": {"unit": "kg", "only": ["weigh"]}},
        {"mcp": SERVER},
        "finish",
    ]
    path = tmp_path / "task.yaml"
    path.write_text(yaml.safe_dump(task(tools, imports=[MODULE], agent_cls=f"{MODULE}.PoliteAgent")))
    answers = [
        call("count_words", text="a bc def", minimum=2),
        call("count_words", text=[1]),
        call("reverse", text="abc"),
        call("reverse", text="bad"),
        call("reverse", words="abc"),
        call("weigh", thing="nail"),
        call("double", number=21),
        call("double", number="many"),
        '<tool_call>{"name": "double", "arguments": {"number": 1, "number": 2}}</tool_call>',
        call("finish", answer="done"),
    ]
    tokenizer = byte_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    runner = AutoAgentRunner.from_task(path, ScriptedModel(tokenizer, answers), tokenizer)
    [group] = [group async for group in runner.groups([{"prompt": [{"role": "user", "content": "Go."}]}])]
    [result] = group.results
    assert result.finish_reason == "FINISH_TOOL", result.failure
    texts = [message["content"] for message in result.messages if message["role"] == "tool"]
    assert [texts[0], texts[2], texts[5], texts[6]] == ["2", '{"results": "cba"}', "4 kg", "42"]
    assert "argument 'text'" in texts[1] and texts[3] == "Error in reverse: a bad text"
    assert texts[4] == "Error calling reverse: argument 'text' is missing"
    assert "number" in texts[7] and "'number' is given twice" in texts[8]
    assert [record.ok for record in result.tool_calls] == [True, False, True, False, False, True, True, False, True]
    assert [schema["function"]["name"] for schema in runner_schemas(tools)] == [
        *("count_words", "reverse", "weigh", "double", "finish"),
    ]


async def test_decorated_coroutine_is_awaited():
    def decorated(run):
        return functools.wraps(run)(lambda *args, **kwargs: run(*args, **kwargs))

    class Slow(import_module(MODULE).CountWords):
        @decorated
        async def run(self, context: ToolContext, text: str) -> int:
            return len(text)

    assert (await Slow().call(ToolContext("t", {}), {"text": "abc"})).text == "3"


def runner_schemas(tools: list[Any]) -> list[dict[str, Any]]:
    return [tool.schema() for tool in make_tools(tools)]


@pytest.mark.parametrize(
    "tools, complaint",
    [
        (["no_such_tool"], "unknown tool 'no_such_tool'"),
        (["no_such_module.Tool"], "cannot import no_such_module"),
        ([f"{MODULE}.CountWord"], "must be the dotted path of a class"),
        ([f"{MODULE}.PoliteAgent"], "must be a subclass of BaseTool or ToolGroup"),
        ([{f"{MODULE}.CountWords": {"a": 1}}], "it has none"),
        ([{f"{MODULE}.Scales": {"weight": 1}}], "unexpected keyword argument 'weight'"),
        ([{f"{MODULE}.Scales": {"only": ["way"]}}], "only: unknown tool 'way'; known: tare, weigh"),
        ([{"mcp": {}}], "needs either command or url"),
        ([{"mcp": {"command": ["/no/such/program"]}}], "cannot be started"),
        ([f"{MODULE}.CountWords", f"{MODULE}.CountWords"], "have the same name 'count_words'"),
    ],
)
def test_invalid_tools_raise_config_error(tools, complaint):
    if "mcp" in str(tools):
        pytest.importorskip("mcp")
    with pytest.raises(ConfigError, match="tools") as error:
        make_tools(tools)
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    "keys, complaint",
    [
        ({"imports": ["no_such_module"]}, "imports: 'no_such_module' cannot be imported: ModuleNotFoundError"),
        ({"agent_cls": f"{MODULE}.Scales"}, "must be a subclass of skyrl_agent.agents.loop.Agent"),
        ({"agent_cls": f"{MODULE}.PoliteAgnt"}, "must be the dotted path of a class"),
        ({"agent_cls": "skyrl_agent.agents.react.ReactAgent"}, "did you mean skyrl_agent.agents.react.ReActAgent"),
    ],
)
def test_invalid_modules_and_agents_raise_config_error(keys, complaint):
    with pytest.raises(ConfigError) as error:
        AutoAgentRunner.from_task_file(read_task(task(["finish"], **keys)), None, byte_tokenizer())
    assert complaint in str(error.value)


async def test_outage_in_published_tool_or_thread_is_outage():
    class Away(import_module(MODULE).CountWords):
        def run(self, context: ToolContext, text: str) -> int:
            raise InfraError("the server is away")

    with pytest.raises(InfraError, match="the server is away"):
        await Away().call(ToolContext("t", {}), {"text": "a"})
