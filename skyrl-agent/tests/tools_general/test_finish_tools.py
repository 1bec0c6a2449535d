import pytest

from skyrl_agent.tools import make_tool

from .agent_web_server import context_of


@pytest.mark.parametrize(
    "name, answer, result",
    [
        ("finish", "42", "42"),
        ("em_finish", "42", "\\boxed{42}"),
        ("em_finish", "It is \\boxed{42}", "It is \\boxed{42}"),
    ],
)
async def test_an_answer_ends_the_agent(name, answer, result):
    output = await make_tool(name).call(context_of(), {"answer": answer})
    assert (output.text, output.ends) == (result, True)


async def test_without_an_answer_the_agent_goes_on():
    output = await make_tool("finish").call(context_of(), {})
    assert output.failed and not output.ends and "'answer' (string) is missing" in output.text


@pytest.mark.parametrize("name", ["finish", "em_finish", "next_with_summary", "code_interpreter", "web_browser"])
def test_schemas_come_from_signatures(name):
    function = make_tool(name).schema()["function"]
    assert function["description"]
    assert all(described.get("description") for described in function["parameters"]["properties"].values())
