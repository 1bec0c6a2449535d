"""Tool calls of an agent: they run within limits, and the model is told the result of each."""

import asyncio
import json

import pytest

from skyrl_agent.agents.toolbox import clip
from skyrl_agent.chat.transitions import transitions_to_training_data
from skyrl_agent.errors import InfraError
from skyrl_agent.testing import byte_tokenizer

from .agent_cases import QUESTION, Sleep, agent_of, call, finish, prompts_of, ran


def hermes(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tokenizer_with_tools():
    """The byte tokenizer with a template that renders calls as Hermes models write them."""
    return byte_tokenizer(
        "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def hermes_agent(script, tools=("test_add", "finish"), **settings):
    return agent_of(script, tools, tool_format="hermes", tokenizer=tokenizer_with_tools(), **settings)


@pytest.fixture(autouse=True)
def forget_sleepers():
    Sleep.forget()


@pytest.mark.parametrize(
    "answer, told",
    [
        (call("add", a=2, b=3), "The sum is 5."),
        (call("add", a="two", b=3), "'a'"),
        (call("add", a=2), "'b'"),
        (call("ad", a=2, b=3), "there is no function 'ad'"),
        (call("broken"), "the gears of this tool are jammed\nsecond line: 4711"),
        (call("cancels_itself"), "cancels_itself was cancelled from within"),
        ("<function=add>\n<parameter=a>2", "<parameter=a> is not closed"),
        ("It is 5.", "had no function call in it"),
    ],
)
async def test_tool_call_errors_reach_model(answer, told):
    agent = agent_of([answer, finish()], ["test_add", "test_broken", "test_cancels_itself", "finish"])
    assert (await agent.run(QUESTION)).finish_reason == "FINISH_TOOL"
    first, second = prompts_of(agent)
    assert second.startswith(first + answer)
    assert told in second.removeprefix(first + answer)


async def test_invalid_argument_reaches_native_tool_and_its_error_model():
    agent = await ran(hermes_agent([hermes("add", a="two", b=3), hermes("finish", answer="5")]))
    assert "Error calling add: argument 'a'" in prompts_of(agent)[1]
    assert [record.ok for record in agent.get_tool_calls()] == [False, True]


async def test_tool_outage_raises_and_ends_trajectory():
    agent = agent_of([call("outage")], ["test_outage", "test_sleep", "finish"])
    with pytest.raises(InfraError, match="the server of this tool is away"):
        await agent.run(QUESTION)
    assert Sleep.log == ["opened", "closed"]


async def test_overdue_tool_call_is_cancelled_and_model_continues():
    agent = agent_of([call("sleep", seconds=60), finish()], ["test_sleep", "finish"], tool_timeout_seconds=0.05)
    assert (await agent.run(QUESTION)).finish_reason == "FINISH_TOOL"
    assert "sleep did not end within 0.05 s and was cancelled" in prompts_of(agent)[1]
    assert Sleep.log == ["opened", "cancelled", "closed"]
    assert [record.ok for record in agent.get_tool_calls()] == [False, True]


async def test_tool_timeout_overrides_default():
    agent = await ran(agent_of([call("nap"), finish()], ["test_nap", "finish"], tool_timeout_seconds=60))
    assert "nap did not end within 0.05 s" in prompts_of(agent)[1]


async def test_tool_call_that_ignores_cancellation_is_abandoned(monkeypatch):
    monkeypatch.setattr("skyrl_agent.agents.pending.GRACE_SECONDS", 0.05)
    agent = agent_of([call("stubborn"), finish()], ["test_stubborn", "finish"], tool_timeout_seconds=0.05)
    assert (await agent.run(QUESTION)).finish_reason == "FINISH_TOOL"
    assert "stubborn did not end" in prompts_of(agent)[1]
    await asyncio.sleep(0.6)  # it ends by itself


async def test_long_outputs_are_truncated_in_middle_with_notice():
    agent = await ran(agent_of([call("long", size=5000), finish()], ["test_long", "finish"], max_tool_output_chars=200))
    told = prompts_of(agent)[1]
    assert "begin" + "x" * 95 + "\n[... 4808 characters left out ...]\n" + "x" * 97 + "end" in told


@pytest.mark.parametrize(
    "length, limit, expected", [(5, 5, "01234"), (6, 5, "012\n[... 1 characters left out ...]\n45")]
)
def test_clip(length, limit, expected):
    assert clip("0123456789"[:length], limit) == expected


@pytest.mark.parametrize("parallel, most", [(1, 1), (3, 3), (9, 4)])
async def test_tool_calls_in_same_turn_run_concurrently(parallel, most):
    turn = "".join(hermes("sleep", seconds=0.05) for _ in range(4))
    agent = hermes_agent(
        [turn, hermes("finish", answer="5")], ["test_sleep", "finish"], max_parallel_tool_calls=parallel
    )
    assert await agent.run(QUESTION) == ("FINISH_TOOL", "5")
    assert Sleep.most == most
    told = prompts_of(agent)[1].removeprefix(prompts_of(agent)[0] + turn)
    assert told.count("Slept 0.05 s.") == most
    assert told.count(f"Not run: at most {parallel} function call(s)") == 4 - most
    assert len(transitions_to_training_data(agent.get_transitions())) == 1


async def test_unreadable_call_is_reported_among_excess_calls():
    turn = hermes("add", a=2, b=3) + hermes("add", a=1, b=1) + "<tool_call>{nonsense</tool_call>"
    agent = await ran(hermes_agent([turn, hermes("finish", answer="5")]), "FINISH_TOOL")
    told = prompts_of(agent)[1].removeprefix(prompts_of(agent)[0] + turn)
    assert "The sum is 5." in told and "The sum is 2." not in told
    assert "Not run: at most 1 function call(s)" in told and "not valid JSON" in told


async def test_second_call_in_turn_is_reported_as_ignored():
    agent = await ran(agent_of([call("add", a=2, b=3) + call("add", a=1, b=1), finish()]))
    assert "The sum is 5." in prompts_of(agent)[1] and "1 more ignored" in prompts_of(agent)[1]


async def test_outage_cancels_parallel_tool_calls():
    turn = hermes("sleep", seconds=60) + hermes("outage")
    agent = hermes_agent([turn], ["test_sleep", "test_outage", "finish"], max_parallel_tool_calls=2)
    with pytest.raises(InfraError):
        await agent.run(QUESTION)
    assert Sleep.log == ["opened", "cancelled", "closed"]


async def test_tool_calls_sharing_runtime_run_sequentially():
    turn = "".join(hermes("sleep", seconds=0.01) for _ in range(3))
    agent = hermes_agent(
        [turn, hermes("finish", answer="5")], ["test_sleep", "finish"], max_parallel_tool_calls=3, runtime=object()
    )
    await agent.run(QUESTION)
    assert Sleep.most == 1
    assert prompts_of(agent)[1].count("Slept 0.01 s.") == 3


async def test_calls_after_finish_call_are_skipped():
    turn = hermes("finish", answer="5") + hermes("sleep", seconds=60)
    agent = hermes_agent([turn], ["test_sleep", "finish"], max_parallel_tool_calls=2, runtime=object())
    assert await agent.run(QUESTION) == ("FINISH_TOOL", "5")
    assert [record.name for record in agent.get_tool_calls()] == ["finish"]


async def test_each_tool_call_is_recorded():
    agent = agent_of([call("add", a=2, b=3), call("broken"), finish()], ["test_add", "test_broken", "finish"])
    await agent.run(QUESTION)
    seen = [(record.step, record.name, record.arguments, record.ok) for record in agent.get_tool_calls()]
    assert [(step, name, ok) for step, name, _, ok in seen] == [
        (1, "add", True),
        (2, "broken", False),
        (3, "finish", True),
    ]
    assert agent.get_tool_calls()[0].output == "The sum is 5."


async def test_cancelling_agent_cancels_call_and_closes_tools():
    agent = agent_of([call("sleep", seconds=60)], ["test_sleep", "finish"])
    task = asyncio.create_task(agent.run(QUESTION))
    while Sleep.now == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Sleep.log == ["opened", "cancelled", "closed"]
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_new_context_starts_new_row():
    script = [call("turn_page", memory="one"), call("turn_page", memory="two"), finish("two pages")]
    agent = await ran(agent_of(script, ["test_turn_page", "finish"]), "FINISH_TOOL", "two pages")
    first, second, third = prompts_of(agent)
    assert "You read a book page by page.\n\n---\n\nDo it." in first
    assert "Memory: one. Page 1." in second and "What is 2 + 3?" not in second
    assert "You read a book page by page." in second and "finish" in second
    assert "Memory: two. Page 2." in third and "Memory: one" not in third
    assert len(transitions_to_training_data(agent.get_transitions())) == 3


async def test_side_question_is_not_recorded_as_transition():
    def script(prompt: str, turn: int) -> str:
        return "blue" if prompt.endswith("Which colour?<|im_end|>\n<|im_start|>assistant\n") else answers.pop(0)

    answers = [call("ask", question="Which colour?"), finish("blue")]
    agent = await ran(agent_of(script, ["test_ask", "finish"]))
    assert "It said: blue" in prompts_of(agent)[-1]
    assert len(agent.get_transitions()) == 2
