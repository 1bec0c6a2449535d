"""Endings of an agent: each row of the table of finish reasons that an agent decides on."""

import pytest

from skyrl_agent.agents.react import ReActAgent
from skyrl_agent.chat.transitions import transitions_to_training_data
from skyrl_agent.config.configuration_utils import TrajectoryConfig
from skyrl_agent.errors import BackendError, InfraError
from skyrl_agent.testing import ScriptedModel, byte_tokenizer
from skyrl_agent.testing.tokenizer import CHATML

from .agent_cases import QUESTION, agent_of, call, finish, prompts_of, ran

ADDS, TURNS = ("test_add", "finish"), ("test_turn_page", "finish")
PAGES = [call("turn_page", memory=f"page {n}") for n in range(5)]


@pytest.mark.parametrize(
    "script, tools, settings, reason, result",
    [
        ([call("add", a=2, b=3), finish()], ADDS, {}, "FINISH_TOOL", "5"),
        ([finish("y" * 900)], ("finish",), {"max_tool_output_chars": 200}, "FINISH_TOOL", "y" * 900),  # never cut
        ([*(call("add", a=n, b=0) for n in range(8)), finish()], ADDS, {"max_iterations": 9}, "FINISH_TOOL", "5"),
        ([*PAGES, finish()], TURNS, {"max_prompt_length": 90, "max_iterations": 9}, "FINISH_TOOL", "5"),  # anew a page
        ([call("turn_page", memory="same")] * 6 + [finish()], TURNS, {"max_iterations": 9}, "FINISH_TOOL", "5"),
        (["It is 5."], (), {}, "FINISH", "It is 5."),
        ([call("add", a=2, b=3), "It is 5."], ("test_add",), {}, "FINISH", "It is 5."),
        ([call("add", a=2, b=3)], ADDS, {"max_iterations": 2}, "max_iterations_reached", None),
        ([call("add", a=2, b=3)], ADDS, {"max_iterations": 9}, "stuck_in_a_loop", None),
        (["I will think about it."], ADDS, {"max_iterations": 9}, "stuck_in_a_loop", None),
        ([call("add", a=2), "Hm."] * 9, ADDS, {"max_iterations": 9}, "stuck_in_a_loop", None),
        ([""], ADDS, {}, "BAD_LLM_RESPONSE", None),
        ([" \n "], (), {}, "BAD_LLM_RESPONSE", None),
        ([finish("x" * 99)], ("finish",), {"max_prompt_length": 50}, "CONTEXT_WINDOW_EXCEEDED", None),
        ([finish("x" * 99)], ("finish",), {"sampling_params": {"max_tokens": 50}}, "CONTEXT_WINDOW_EXCEEDED", None),
        ([call("long", size=400)], ("test_long",), {"max_prompt_length": 300}, "CONTEXT_WINDOW_EXCEEDED", None),
        ([finish()], ("finish",), {"max_context_length": 20}, "CONTEXT_WINDOW_EXCEEDED", None),
    ],
)  # fmt: skip
async def test_agent_reports_finish_reason(script, tools, settings, reason, result):
    await ran(agent_of(script, tools, **settings), reason, result)


async def test_truncated_turn_is_transition_without_tool_call():
    agent = agent_of([call("add", a=2, b=3)], sampling_params={"max_tokens": len(call("add", a=2, b=3))})
    assert (await agent.run(QUESTION)).finish_reason == "CONTEXT_WINDOW_EXCEEDED"
    assert len(agent.get_transitions()) == 1
    assert agent.get_tool_calls() == []


ANSWER_TOKENS = len(finish()) + 1  # and the end of the turn


@pytest.mark.parametrize(
    "budget, reason",
    [
        (ANSWER_TOKENS, "FINISH_TOOL"),  # the last token of the budget is the end of the turn
        (ANSWER_TOKENS - 1, "CONTEXT_WINDOW_EXCEEDED"),
        (1, "CONTEXT_WINDOW_EXCEEDED"),
    ],
)
async def test_first_turn_respects_token_budget(budget, reason):
    agent = await ran(agent_of([finish()], ["finish"], max_prompt_length=budget), reason)
    [request] = agent.infer_engine.requests
    assert request.sampling_params["max_tokens"] == budget


@pytest.mark.parametrize(
    "spare, reason, turns",
    [
        (0, "FINISH_TOOL", 2),
        (-1, "CONTEXT_WINDOW_EXCEEDED", 2),
        (1 - ANSWER_TOKENS, "CONTEXT_WINDOW_EXCEEDED", 2),
        (-ANSWER_TOKENS, "CONTEXT_WINDOW_EXCEEDED", 1),  # used up by results: nothing more is asked
    ],
)
async def test_budget_counts_completions_and_tool_results(spare, reason, turns):
    script = [call("add", a=2, b=3), finish()]
    free = agent_of(script)
    await free.run(QUESTION)
    first, last = free.get_transitions()
    used = len(last.ob.input_ids) + len(last.ac.token_ids) - len(first.ob.input_ids)
    agent = await ran(agent_of(script, max_prompt_length=used + spare), reason)
    assert len(agent.infer_engine.requests) == turns


@pytest.mark.parametrize("max_tokens, sent", [(7, 7), (None, 1000), (5000, 1000)])
async def test_turn_max_tokens_is_minimum_of_sampling_and_budget(max_tokens, sent):
    agent = agent_of(
        [finish()], ["finish"], max_prompt_length=1000, sampling_params={"max_tokens": max_tokens, "top_p": 1}
    )
    await agent.run(QUESTION)
    assert agent.infer_engine.requests[0].sampling_params == {"max_tokens": sent, "top_p": 1}


async def test_turns_share_request_id_and_training_row():
    agent = await ran(agent_of([call("add", a=2, b=3), "Hm.", finish()]))
    assert len({request.request_id for request in agent.infer_engine.requests}) == 1
    [row] = transitions_to_training_data(agent.get_transitions())
    written = [token for token, mask in zip(row.response_tokens, row.response_mask, strict=True) if mask]
    assert byte_tokenizer().decode(written) == f"{call('add', a=2, b=3)}<|im_end|>Hm.<|im_end|>{finish()}<|im_end|>"
    assert row.response_logprobs is not None and set(row.response_logprobs) == {0.0, -0.5}


@pytest.mark.parametrize("model", [{"model_logprob": None}, {"model_tells_ids": False}])
async def test_missing_log_probs_are_null(model):
    agent = await ran(agent_of([call("add", a=2, b=3), finish()], **model), "FINISH_TOOL")
    rows = transitions_to_training_data(agent.get_transitions())
    assert [row.response_logprobs for row in rows] == [None]


class Refusing(ScriptedModel):
    """A model's server that fails."""

    error: Exception = InfraError("the engine is dead")

    async def async_generate_ids(self, **request):
        raise self.error


@pytest.mark.parametrize("error", [InfraError("the engine is dead"), BackendError("no such model")])
async def test_model_failure_raises_and_closes_tools(error):
    agent = agent_of(["never"], ["finish"])
    agent.model.infer_engine = Refusing(byte_tokenizer(), ["never"])
    agent.model.infer_engine.error = error
    with pytest.raises(type(error), match=str(error)):
        await agent.run(QUESTION)
    assert agent.get_transitions() == []


async def test_model_timeout_is_infrastructure_failure():
    agent = agent_of([finish()], ["finish"], request_timeout_seconds=0.05, model_seconds=60)
    with pytest.raises(InfraError, match=r"generator\.request_timeout_seconds"):
        await agent.run(QUESTION)


class Aborting(ScriptedModel):
    async def async_generate_ids(self, **request):
        text, meta = await super().async_generate_ids(**request)
        return text, {**meta, "finish_reason": "abort"}


async def test_aborted_completion_is_infrastructure_failure():
    agent = agent_of([finish()], ["finish"])
    agent.model.infer_engine = Aborting(byte_tokenizer(), [finish()])
    with pytest.raises(InfraError, match="aborted"):
        await agent.run(QUESTION)


async def test_reminders_are_appended_without_editing_history():
    script = [call("add", a=n, b=0) for n in range(3)]
    agent = await ran(agent_of(script, enable_turn_reminder=True, early_step_threshold=2, max_iterations=3))
    first, second, third = prompts_of(agent)
    assert "What is 2 + 3?\n\n<reminder>Step 1 of 3. Take at least 2 steps before you finish.</reminder>" in first
    assert "<reminder>Step 2 of 3. Take at least 2" in second and second.startswith(first)
    assert "<reminder>Step 3 of 3. This is the last one" in third and third.startswith(second)
    assert "<reminder>" not in agent.get_messages()[-1]["content"]  # there is no fourth step
    assert len(transitions_to_training_data(agent.get_transitions())) == 1


async def test_removing_earlier_thoughts_makes_one_row_per_turn():
    script = [f"<think>secret plan</think>{call('add', a=2, b=3)}", f"<think>sum</think>{finish()}"]
    agent = await ran(agent_of(script, remove_think_tokens=True), "FINISH_TOOL", "5")
    assert "secret plan" not in prompts_of(agent)[1]
    assert "<function=add>" in prompts_of(agent)[1]
    assert len(transitions_to_training_data(agent.get_transitions())) == 2


async def test_published_configuration_builds_agent():
    config = TrajectoryConfig(tools=["test_add", "finish"], max_prompt_length=10_000, profile_tools=True)
    tokenizer = byte_tokenizer()
    model = ScriptedModel(tokenizer, [f"<think>\nAdd.\n</think>\n\n{call('add', a=2, b=3)}", finish()])
    agent = ReActAgent(config, model, tokenizer)
    finish_reason, result = await agent.run(QUESTION)
    assert (finish_reason, result) == ("FINISH_TOOL", "5")
    assert agent.get_tool_profile() == {"tool_calls_total": 2, "tool_calls_by_name": {"add": 1, "finish": 1}}
    assert len(transitions_to_training_data(agent.get_transitions())) == 1  # its template keeps thoughts


async def test_requests_stop_at_turn_end_of_template():
    tokenizer = byte_tokenizer(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    agent = agent_of([call("add", a=2, b=3), finish()], tokenizer=tokenizer)
    await agent.run(QUESTION)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    model = agent.model.infer_engine
    assert isinstance(model, ScriptedModel)
    assert [request.sampling_params["stop_token_ids"] for request in model.requests] == [[end], [end]]


async def test_text_of_other_channels_is_excluded_from_response():
    said = "<|channel|>analysis<|message|>2 + 3<|end|><|start|>assistant<|channel|>final<|message|>It is 5.<|return|>"
    agent = await ran(agent_of([said], (), tool_format="gpt_oss"), "FINISH", "It is 5.")
    assert agent.infer_engine.requests[0].sampling_params["skip_special_tokens"] is False


async def test_memory_sections_exclude_earlier_reminders():
    script = [call("next_with_summary", summary="nothing"), call("next_with_summary", summary="much"), finish()]
    tools = [{"next_with_summary": {"section_chars": 20}}, "finish"]
    agent = agent_of(script, tools, enable_turn_reminder=True)
    text = "Document 1: the sky\nDocument 2: the sea\n"
    assert (await agent.run(QUESTION, {"context": text})).finish_reason == "FINISH_TOOL"
    for prompt in prompts_of(agent):
        assert prompt.count("<reminder>") == prompt.count("You read a text") == prompt.count("BEGIN FUNCTION #1") == 1
    assert "the sea" in prompts_of(agent)[2] and "much" in prompts_of(agent)[2]
    assert len(transitions_to_training_data(agent.get_transitions())) == 3
