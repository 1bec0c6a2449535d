"""Conversations go on from the tokens they were made of. Here with the tokenizer and the template of Qwen2.5, which has
tool calls, and white space of its own."""

import pytest
from transformers import AutoTokenizer

from skyrl_train.endpoint.openai_api.prompts import ChatOptions, ConversationMemory, EndpointTemplate, ReturnedMessage
from skyrl_train.utils.chat_templates import CUSTOM_CHAT_TEMPLATES

from .conftest import ADD

OPTIONS = ChatOptions(tools=[ADD])
ASKED = [{"role": "user", "content": "2+3?"}]
WRITTEN = '<tool_call>\n{"name":"add", "arguments": {"a":2,"b":3}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def template(test_data):
    return EndpointTemplate(AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5"))


def history(arguments) -> list:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
    ]


@pytest.fixture
def memory(template):
    memory = ConversationMemory(template)
    prompt = template.render(ASKED, OPTIONS)
    said = ReturnedMessage.of(history({"a": 2, "b": 3})[1])
    memory.remember("s", 1, prompt, template.encode(prompt), [(said, template.encode(WRITTEN))])
    return memory


def test_conversation_continues_from_sampled_tokens(template, memory):
    messages = history({"a": 2, "b": 3})
    text = template.render(messages, OPTIONS)
    ids = memory.find_prompt("s", messages, text, OPTIONS)
    prompt = template.render(ASKED, OPTIONS)
    expected = (
        f"{prompt}{WRITTEN}\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.decode(ids, skip_special_tokens=False) == expected
    assert expected != text  # the template writes the JSON with other spaces
    assert ids[: len(template.encode(prompt + WRITTEN))] == template.encode(prompt + WRITTEN)


def test_conversation_continues_after_empty_completion(template):
    memory, options = ConversationMemory(template), ChatOptions()
    prompt = template.render(ASKED, options)
    memory.remember(
        "s", 1, prompt, template.encode(prompt), [(ReturnedMessage.of({"role": "assistant", "content": ""}), [])]
    )
    for content in ("", "Five."):
        messages = [*ASKED, {"role": "assistant", "content": content}, *ASKED]
        text = template.render(messages, options)
        ids = memory.find_prompt("s", messages, text, options)
        assert ids == (template.encode(text) if content == "" else None)


@pytest.mark.parametrize("session, arguments", [("s", {"a": 2, "b": 4}), ("another", {"a": 2, "b": 3})])
def test_changed_response_is_rendered_again(template, memory, session, arguments):
    messages = history(arguments)
    assert memory.find_prompt(session, messages, template.render(messages, OPTIONS), OPTIONS) is None


def test_changed_earlier_messages_are_rendered_again(template, memory):
    messages = [{"role": "user", "content": "2+4?"}, *history({"a": 2, "b": 3})[1:]]
    assert memory.find_prompt("s", messages, template.render(messages, OPTIONS), OPTIONS) is None


def test_least_recently_used_sessions_are_evicted(template):
    memory = ConversationMemory(template, max_tokens=250)
    for session in ("a", "b", "c"):
        memory.remember(
            session, 1, "", list(range(90)), [(ReturnedMessage.of({"role": "assistant", "content": "x"}), [1, 2])]
        )
    conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]
    assert [memory.has_candidate(session, conversation) for session in ("a", "b", "c")] == [False, True, True]


@pytest.mark.parametrize("name, keeps_thoughts", [("qwen3_with_thinking", True), ("qwen3_without_thinking", False)])
def test_template_may_drop_thoughts_of_earlier_turns(template, name, keeps_thoughts):
    thinking = EndpointTemplate(template.tokenizer, CUSTOM_CHAT_TEMPLATES[name])
    memory, options = ConversationMemory(thinking), ChatOptions()
    written = "<think>two and three</think>Five.<|im_end|>"
    prompt = thinking.render(ASKED, options)
    answer = {"role": "assistant", "content": written.removesuffix("<|im_end|>")}
    memory.remember("s", 1, prompt, thinking.encode(prompt), [(ReturnedMessage.of(answer), thinking.encode(written))])
    messages = [*ASKED, answer, ASKED[0], {"role": "assistant", "content": "Five again."}, ASKED[0]]
    ids = memory.find_prompt("s", messages, thinking.render(messages, options), options)
    assert (ids is not None) == keeps_thoughts
