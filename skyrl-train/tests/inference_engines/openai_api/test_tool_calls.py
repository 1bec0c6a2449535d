"""Tool calls in the text of a model, and messages on their way into a chat template."""

import time

import pytest

from skyrl_train.inference_engines.openai_api.errors import ApiError
from skyrl_train.inference_engines.openai_api.schema import Message
from skyrl_train.inference_engines.openai_api.tool_calls import (
    HermesFormat,
    Llama3Format,
    messages_for_template,
    tool_format,
)

from .conftest import TOOL_TEMPLATE

GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("Five.", "Five.", []),
        (GOOD, "", [("add", '{"a": 1}')]),
        (f"Let me see.\n{GOOD}", "Let me see.", [("add", '{"a": 1}')]),
        (f"{GOOD}\n{GOOD}", "", [("add", '{"a": 1}')] * 2),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"ä\\"}"}</tool_call>', "", [("f", '{"a": "ä"}')]),
        ("<tool_call>{add}</tool_call>", "<tool_call>{add}</tool_call>", []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "argum', None, []),
        (f"<tool_call>nonsense</tool_call>{GOOD}", "<tool_call>nonsense</tool_call>", [("add", '{"a": 1}')]),
    ],
)
def test_hermes_calls_are_read_and_what_is_malformed_stays_text(text, content, calls):
    parsed = HermesFormat().parse(text)
    assert parsed.content == (text if content is None else content)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls


@pytest.mark.parametrize(
    "text, calls",
    [
        ('{"name": "add", "parameters": {"a": 1}}', [("add", '{"a": 1}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", "{}"), ("g", "{}")]),
        ('I would write {"name": "add", "parameters": {}}', []),
        ('{"name": "add", "parameters": {"a": 1}', []),
        ('{"answer": 5}', []),
        ('{"name": "add", "parameters": {}} and so on', []),
    ],
)
def test_llama_calls_are_the_whole_answer_or_none(text, calls):
    parsed = Llama3Format().parse(text)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert parsed.content == ("" if calls else text)


@pytest.mark.parametrize("form", [HermesFormat(), Llama3Format()], ids=["hermes", "llama"])
@pytest.mark.parametrize(
    "text", ["So: " + GOOD, '{"name": "add", "parameters": {"a": 1}}', "a < b, <tool", "plain text"]
)
def test_what_a_stream_shows_is_the_beginning_of_what_the_answer_will_be(form, text):
    shown = ""
    for end in range(len(text) + 1):
        visible = form.visible(text[:end])
        assert visible.startswith(shown)
        shown = visible
    assert form.parse(text).content.startswith(shown)


def test_many_open_tags_are_read_in_linear_time():
    started = time.process_time()
    assert not HermesFormat().parse("<tool_call>" * 100_000).calls
    assert time.process_time() - started < 5


def test_the_format_follows_the_chat_template():
    assert isinstance(tool_format("auto", TOOL_TEMPLATE), HermesFormat)
    assert isinstance(tool_format("auto", 'Respond with {"name": …, "parameters": …}'), Llama3Format)
    assert isinstance(tool_format("auto", None), HermesFormat)
    assert isinstance(tool_format("llama3_json", TOOL_TEMPLATE), Llama3Format)


def test_arguments_reach_the_template_as_an_object_and_parts_as_a_text():
    messages = [
        Message.model_validate({"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}),
        Message.model_validate(
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            }
        ),
    ]
    first, second = messages_for_template(messages)
    assert first == {"role": "system", "content": "aa"}
    assert second["content"] == ""
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    with pytest.raises(ApiError, match="type text"):
        messages_for_template([Message(role="user", content=[{"type": "image_url"}])])
