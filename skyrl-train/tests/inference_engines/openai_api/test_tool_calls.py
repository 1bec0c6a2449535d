"""Tool calls in the text of a model, and messages on their way into a chat template."""

import time

import pytest
from transformers import AutoTokenizer

from skyrl_train.inference_engines.openai_api.errors import ApiError
from skyrl_train.inference_engines.openai_api.prompts import ChatOptions, ChatTemplate, ConversationMemory, Said
from skyrl_train.inference_engines.openai_api.schema import Message
from skyrl_train.inference_engines.openai_api.tool_calls import (
    HermesFormat,
    Llama3Format,
    messages_for_template,
    tool_format,
)

from .conftest import ADD, TOOL_TEMPLATE

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
    started = time.perf_counter()
    assert not HermesFormat().parse("<tool_call>" * 100_000).calls
    assert time.perf_counter() - started < 5


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


class TestAConversationWithARealTemplate:
    """Qwen2.5's tokenizer and template: tool calls, and white space that the template puts its own way."""

    OPTIONS = ChatOptions(tools=[ADD])
    ASKED = [{"role": "user", "content": "2+3?"}]  # noqa: RUF012
    WRITTEN = '<tool_call>\n{"name":"add", "arguments": {"a":2,"b":3}}\n</tool_call><|im_end|>'

    @pytest.fixture(scope="class")
    def template(self, test_data):
        return ChatTemplate(AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5"))

    def history(self, arguments) -> list:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [
            *self.ASKED,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]

    @pytest.fixture
    def memory(self, template):
        memory = ConversationMemory(template)
        prompt = template.text(self.ASKED, self.OPTIONS)
        said = Said.of(self.history({"a": 2, "b": 3})[1])
        memory.remember("s", 1, prompt, template.encode(prompt), [(said, template.encode(self.WRITTEN))])
        return memory

    def test_goes_on_from_the_tokens_that_were_drawn(self, template, memory):
        messages = self.history({"a": 2, "b": 3})
        text = template.text(messages, self.OPTIONS)
        ids = memory.recall("s", messages, text, self.OPTIONS)
        prompt = template.text(self.ASKED, self.OPTIONS)
        expected = (
            f"{prompt}{self.WRITTEN}\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        assert template.decode(ids, skip_special_tokens=False) == expected
        assert expected != text  # the template writes the JSON with other spaces
        assert ids[: len(template.encode(prompt + self.WRITTEN))] == template.encode(prompt + self.WRITTEN)

    @pytest.mark.parametrize("session, arguments", [("s", {"a": 2, "b": 4}), ("another", {"a": 2, "b": 3})])
    def test_is_rendered_where_the_answer_is_another(self, template, memory, session, arguments):
        messages = self.history(arguments)
        assert memory.recall(session, messages, template.text(messages, self.OPTIONS), self.OPTIONS) is None

    def test_is_rendered_where_earlier_messages_changed(self, template, memory):
        messages = [{"role": "user", "content": "2+4?"}, *self.history({"a": 2, "b": 3})[1:]]
        assert memory.recall("s", messages, template.text(messages, self.OPTIONS), self.OPTIONS) is None

    def test_sessions_that_were_silent_longest_are_forgotten(self, template):
        memory = ConversationMemory(template, max_tokens=250)
        for session in ("a", "b", "c"):
            memory.remember(session, 1, "", list(range(90)), [(Said("x", ()), [1, 2])])
        conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]
        assert [memory.may_know(session, conversation) for session in ("a", "b", "c")] == [False, True, True]
