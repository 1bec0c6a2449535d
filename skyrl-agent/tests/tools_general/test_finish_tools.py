from importlib import import_module

import pytest

from skyrl_agent.errors import ConfigError
from skyrl_agent.tools import TOOL_REGISTRY, make_tool
from skyrl_gym.tools.signature import Signature

from .agent_web_server import context_of


@pytest.mark.parametrize(
    "name, answer, result",
    [
        ("finish", "42", "42"),
        ("em_finish", "42", "\\boxed{42}"),
        ("em_finish", "It is \\boxed{42}", "It is \\boxed{42}"),
    ],
)
async def test_finish_tool_ends_agent(name, answer, result):
    output = await make_tool(name).call(context_of(), {"answer": answer})
    assert (output.text, output.ends) == (result, True)


async def test_missing_answer_does_not_end_agent():
    output = await make_tool("finish").call(context_of(), {})
    assert output.failed and not output.ends and "'answer' (string) is missing" in output.text


@pytest.mark.parametrize("name", sorted(name for name, found in TOOL_REGISTRY.items() if isinstance(found, str)))
def test_tool_schemas_match_signatures(name):
    module, _, attribute = str(TOOL_REGISTRY[name]).partition(":")
    tool = getattr(import_module(module), attribute)
    assert tool.name == {"em_finish": "finish"}.get(name, name)
    assert tool.run.__doc__
    for described in Signature(tool.run, skip=2).schema()["properties"].values():
        assert described["description"] and ("type" in described or "anyOf" in described or "enum" in described)


@pytest.mark.parametrize(
    "name, settings, text",
    [
        ("finsh", {}, "finish"),
        ("finish", {"anwser": 1}, "settings of finish: .*'anwser'; it has none"),
        ("local_search", {"tpok": 1}, "local_search"),
    ],
)
def test_tool_errors_list_available_names(name, settings, text):
    with pytest.raises(ConfigError, match=text):
        make_tool(name, settings)
