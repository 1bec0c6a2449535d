"""Agents that hand parts of their work to others."""

import pytest

from skyrl_agent.chat.transitions import transitions_to_training_data
from skyrl_agent.errors import ConfigError, InfraError

from .agent_cases import QUESTION, agent_of, call, finish, prompts_of, ran


def family(*, parent, child):
    """A script by who is asked: the child's system message is that of sub-agents."""
    parent, child = list(parent), list(child)

    def script(prompt: str, turn: int) -> str:
        return (child if "Another agent handed you" in prompt else parent).pop(0)

    return script


def delegate(task: str = "Add 2 and 3") -> str:
    return call("delegate", task=task)


async def test_sub_agent_turns_are_separate_rows_of_trajectory():
    script = family(parent=[delegate(), finish("five")], child=[call("add", a=2, b=3), finish("The sum is five")])
    agent = await ran(agent_of(script, ["test_add", "delegate", "finish"]), "FINISH_TOOL", "five")
    assert "The sum is five" in prompts_of(agent)[-1]
    child, parent = transitions_to_training_data(agent.get_transitions())
    assert sum(child.response_mask) == len(call("add", a=2, b=3)) + len(finish("The sum is five")) + 2
    assert sum(parent.response_mask) == len(delegate()) + len(finish("five")) + 2
    assert [record.name for record in agent.get_tool_calls()] == ["delegate", "finish", "add", "finish"]


async def test_sub_agents_with_same_task_have_separate_rows():
    script = family(parent=[delegate(), delegate(), finish()], child=[finish("a"), finish("b")])
    agent = await ran(agent_of(script, ["delegate", "finish"]))
    assert len(transitions_to_training_data(agent.get_transitions())) == 3
    assert len({request.request_id for request in agent.infer_engine.requests}) == 3


async def test_nested_sub_agents_require_permission():
    script = family(parent=[delegate(), finish()], child=[delegate(), finish()])
    agent = await ran(agent_of(script, ["delegate", "finish"]), "FINISH_TOOL")
    assert "there is no function 'delegate'" in prompts_of(agent)[2]
    deeper = agent_of(
        family(parent=[delegate(), finish()], child=[delegate(), finish("x"), finish("y")]),
        ["delegate", "finish"],
        max_depth=2,
    )
    await ran(deeper)
    assert len(deeper.sub_agents) == len(deeper.sub_agents[0].sub_agents) == 1


async def test_sub_agents_share_step_limit_and_parent_continues():
    child = [call("add", a=n, b=0) for n in range(9)]
    script = family(parent=[delegate(), delegate(), finish()], child=child)
    agent = agent_of(script, ["test_add", "delegate", "finish"], sub_agent_steps=3, max_iterations=5)
    assert (await agent.run(QUESTION)).finish_reason == "FINISH_TOOL"
    assert agent.sub_agents[0].num_steps == 3
    told = prompts_of(agent)
    assert "ended without an answer: max_iterations_reached" in told[4]
    assert "the steps for sub-agents are used up: do the work yourself" in told[5]


async def test_sub_agent_tools_are_configurable():
    tools = [{"delegate": {"tools": ["finish"], "max_iterations": 1}}, "test_add", "finish"]
    script = family(parent=[delegate(), finish()], child=[call("add", a=2, b=3)])
    agent = await ran(agent_of(script, tools))
    assert list(agent.sub_agents[0].toolbox.tools) == ["finish"]
    assert agent.sub_agents[0].num_steps == 1


async def test_outage_in_sub_agent_ends_trajectory():
    script = family(parent=[delegate()], child=[call("outage")])
    with pytest.raises(InfraError):
        await agent_of(script, ["test_outage", "delegate", "finish"]).run(QUESTION)


def test_invalid_sub_agent_tool_is_rejected_before_start():
    with pytest.raises(ConfigError, match="finish"):
        agent_of(["x"], [{"delegate": {"tools": ["finsh"]}}])
