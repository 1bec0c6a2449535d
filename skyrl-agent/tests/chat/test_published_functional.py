"""Published names of `skyrl_agent.functional`: conversion of messages, a message history, recorded transitions."""

import json

import pytest

from skyrl_agent.errors import BackendError
from skyrl_agent.functional.function_calling import (
    FunctionCallConversionError,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from skyrl_agent.functional.history import MessageHistory, parse_tool_call
from skyrl_agent.functional.utils import Observation, TokensWithLogprobs, Transition, record_transition
from skyrl_gym.chat.function_xml import write_call

EDIT = {
    "name": "edit",
    "parameters": {"properties": {"path": {"type": "string"}, "line": {"type": "integer"}}, "required": ["path"]},
}
TOOLS = [{"type": "function", "function": EDIT}]
GOOD_META = {"output_tokens": [4], "finish_reason": "stop", "logprobs": [-0.5], "weight_versions": [3]}


def test_calls_survive_conversion_to_text_and_back():
    given = {"path": "a\nb", "line": 3}
    call = {"id": "toolu_01", "type": "function", "function": {"name": "edit", "arguments": json.dumps(given)}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "I edit.", "tool_calls": [call]},
        {"role": "tool", "name": "edit", "content": "done", "tool_call_id": "toolu_01"},
        {"role": "assistant", "content": "Over."},
    ]
    plain = convert_fncall_messages_to_non_fncall_messages(messages, TOOLS)
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "user", "assistant"]
    assert plain[3]["content"] == "EXECUTION RESULT of [edit]:\ndone"
    back = convert_non_fncall_messages_to_fncall_messages(plain, TOOLS)
    assert json.loads(back[2]["tool_calls"][0]["function"].pop("arguments")) == given
    call["function"].pop("arguments")
    call["index"] = 1
    assert back == messages


def test_function_prompt_is_optional_without_system_message():
    messages = [{"role": "user", "content": "U"}]
    assert convert_fncall_messages_to_non_fncall_messages(messages, TOOLS, False) == messages
    (shown,) = convert_fncall_messages_to_non_fncall_messages(messages, TOOLS)
    assert write_call("edit", {"path": "<path>"}) in shown["content"]


def test_malformed_messages_are_rejected():
    with pytest.raises(FunctionCallConversionError, match=r"needs function\.name"):
        bad_call = {"function": {"name": "edit", "arguments": "[1]"}}
        convert_fncall_messages_to_non_fncall_messages([{"role": "assistant", "tool_calls": [bad_call]}], TOOLS)
    with pytest.raises(FunctionCallConversionError, match="role must be"):
        convert_fncall_messages_to_non_fncall_messages([{"role": "judge", "content": ""}], TOOLS)


def test_message_history_appends_and_resets():
    history = MessageHistory()
    with pytest.raises(ValueError, match="history is empty"):
        history.append_to_last_message("x")
    first = [{"role": "user", "content": "U"}]
    history.initialize(first)
    assert history.was_reset() and len(history) == 1
    history.clear_reset_flag()
    history.add_assistant("A")
    history.add_tool_error("no such file")
    history.add_tool_response({"n": 1})
    history.add_user_guidance("go on")
    history.add_turn_reminder("2 left")
    assert [m["content"] for m in history.get_messages()] == [
        "U", "A", '{"error": "no such file"}', '{"n": 1}', "go on\n\n2 left"
    ]  # fmt: skip
    assert first == [{"role": "user", "content": "U"}] and not history.was_reset()


def test_parse_tool_call_returns_call_or_error():
    call, error = parse_tool_call(write_call("edit", {"path": "a"}), TOOLS)
    assert call is not None and error is None
    assert call["function"] == {"name": "edit", "arguments": '{"path": "a"}'}
    assert parse_tool_call("none", TOOLS) == (None, None)
    assert parse_tool_call(write_call("edit", {}), TOOLS) == (
        None,
        "function 'edit' needs the parameter 'path', which is missing",
    )


class Model:
    def __init__(self, answers):
        self.transitions, self.answers = [], iter(answers)

    @record_transition
    async def ask(self, *, input_ids):
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_record_transition_records_only_successful_replies():
    model = Model(
        [("a", GOOD_META), OSError(), ("b", {"output_tokens": None, "finish_reason": "length", "logprobs": None})]
    )
    read = [1, 2]
    assert await model.ask(input_ids=read) == ("a", GOOD_META)
    read.append(4)  # the caller goes on with its list
    with pytest.raises(OSError):
        await model.ask(input_ids=read)
    await model.ask(input_ids=read)
    assert model.transitions == [
        Transition(Observation([1, 2]), TokensWithLogprobs([4], [-0.5], "a", [3]), metrics={"finish_reason": "stop"}),
        Transition(Observation([1, 2, 4]), TokensWithLogprobs(None, None, "b"), metrics={"finish_reason": "length"}),
    ]


async def test_record_transition_rejects_positional_ids_and_missing_log_probs():
    model = Model([("a", {"output_tokens": [4], "finish_reason": "stop", "logprobs": [-0.5, -0.5]})])
    with pytest.raises(TypeError, match="keyword input_ids"):
        await model.ask([1])
    with pytest.raises(BackendError, match="2 log-probs for 1"):
        await model.ask(input_ids=[1])
