"""Every real chat template: what the model reads is token for token what the template renders, and the message is named
where it does not just append."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from skyrl_agent.chat.conversation import Conversation
from skyrl_agent.chat.encoding import MessageEncoder
from skyrl_agent.chat.transitions import transitions_to_training_data
from skyrl_agent.errors import ConfigError

from .conversation_play import play, told

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What."}},
            "required": ["query"],
        },
    },
}


def says(role, content):
    return {"role": role, "content": content}


def calls(query):
    function = {"name": "search", "arguments": {"query": query}}
    return says("assistant", "") | {"tool_calls": [{"id": "call00000", "type": "function", "function": function}]}


def result(text):
    return says("tool", text) | {"name": "search", "tool_call_id": "call00000"}


SYSTEM = says("system", "Be brief.")
PLAIN = [
    says("user", "1+1?"),
    says("assistant", "2, I think."),
    says("user", "Why?"),
    says("assistant", "It is so."),
    says("user", "Sure?\n"),
    says("assistant", "Yes."),
]
THOUGHTS = [
    says("user", "1+1?"),
    says("assistant", "<think>\nOne more than one.\n</think>\n\n2"),
    says("user", "1+2?"),
    says("assistant", "<think>\nOne more than that.\n</think>\n\n3"),
    says("user", "1+3?"),
    says("assistant", "4"),
]
TOOLS = [says("user", "1+1?"), calls("one"), result("1 \n"), calls("two"), result("<2>"), calls("three"), result("3")]
QUESTION_AFTER_TOOLS = [*TOOLS, says("assistant", "2"), says("user", "Why?"), says("assistant", "So.")]


SCRIPTS = {
    "plain": PLAIN,
    "system": [SYSTEM, *PLAIN],
    "thoughts": THOUGHTS,
    "tools": TOOLS,
    "question": QUESTION_AFTER_TOOLS,
}
NO_CALLS = "takes no calls"


@dataclass
class Facts:
    """Behaviour of a template: how it ends a response, and which messages of a script it renders differently later."""

    end: str = "<|im_end|>"
    end_of_call: str = "<|im_end|>"
    plain: Sequence[int] = ()
    system: Sequence[int] = ()
    thoughts: Sequence[int] = ()
    tools: Sequence[int] | str = ()
    question: Sequence[int] | str = ()


# The headers of these open a thought, and are without it once an answer stands under them.
THINKING_HEADER = Facts(plain=(1, 3), system=(2, 4), thoughts=(1, 3), tools=(1, 3), question=(1, 3, 5, 7))
# The same, and results of calls are closed anew when another follows.
DEEPSEEK_R1 = replace(
    THINKING_HEADER, end="<｜end▁of▁sentence｜>", end_of_call="<｜tool▁call▁end｜>", tools=(1, 2), question=(1, 2, 4)
)
TEMPLATES = {
    "Mistral-Small-3.2-24B-Instruct-2506": Facts(question=(0,)),  # the tools stand before the last question
    "Qwen-QwQ-32B": THINKING_HEADER,
    "Qwen-Qwen2.5-7B-Instruct": Facts(),
    "Qwen-Qwen3-0.6B": Facts(thoughts=(1, 3)),
    "Qwen-Qwen3-Coder-30B-A3B-Instruct": Facts(),
    "Qwen3-nonthinking": THINKING_HEADER,
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": DEEPSEEK_R1,
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": DEEPSEEK_R1,
    "deepseek-ai-DeepSeek-V3.1": Facts("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", thoughts=(1, 3)),
    "ibm-granite-granite-3.3-2B-Instruct": Facts("<|end_of_text|>", tools=NO_CALLS, question=NO_CALLS),
    "mistralai-Mistral-Nemo-Instruct-2407": Facts(system=(1, 3), question=(0,)),  # so does the system message
    "openai-gpt-oss-120b": Facts("<|end|>", "<|call|>", thoughts=(1, 3)),
}


def test_template_list_covers_data_folder(tokenizer_data):
    assert {path.stem for path in (tokenizer_data / "chat_templates").glob("*.jinja")} == {*TEMPLATES}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_input_ids_equal_rendered_template(qwen, name, script):
    facts, messages = TEMPLATES[name], SCRIPTS[script]
    written_anew = getattr(facts, script)
    has_tools = script in ("tools", "question")
    encoder = MessageEncoder(qwen(name, facts.end), tools=[SEARCH] if has_tools else None)
    if written_anew == NO_CALLS:
        with pytest.raises(ConfigError, match="function_xml"):
            encoder.text(messages)
        return
    conversation = play(encoder, messages, facts.end, facts.end_of_call)
    assert [found.message_index for found in conversation.breaks] == [*written_anew]
    assert [found.role for found in conversation.breaks] == [messages[index]["role"] for index in written_anew]
    rows = transitions_to_training_data(conversation.transitions)
    assert len(rows) == 1 + len(written_anew)
    assert all(row.response_logprobs is not None for row in rows)


SIX_TURNS = [
    says("user", "0+1?"),
    *(
        message
        for number in range(6)
        for message in (
            says("assistant", f"<think>\nOne more than {number}.\n</think>\n\n{number + 1}"),
            says("user", f"{number + 1}+1?"),
        )
    ),
]
SIX_CALLS = [says("user", "Look."), *(message for n in range(6) for message in (calls(f"q{n}"), result(f"r{n}")))]


@pytest.mark.parametrize("script", ["thoughts", "calls"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_append_only_templates_make_one_row_of_six_turns(qwen, name, script):
    """All thoughts, calls and results are in it once, each turn ended and begun as the template does it."""
    facts, messages = TEMPLATES[name], SIX_TURNS if script == "thoughts" else SIX_CALLS
    if script == "calls" and facts.tools == NO_CALLS:
        return
    end = facts.end_of_call if script == "calls" else facts.end
    encoder = MessageEncoder(qwen(name, facts.end), tools=[SEARCH] if script == "calls" else None)
    conversation = Conversation(encoder, messages[:1], append_only=True)
    written = []
    for answer, added in zip(messages[1::2], messages[2::2], strict=True):
        written.append(answer["content"] or f"CALL-{len(written)}")
        conversation.input_ids()
        conversation.add_answer(written[-1] + end, told(encoder.encode(written[-1] + end)), answer)
        conversation.add(added)
    text = encoder.decode(conversation.input_ids())
    [row] = transitions_to_training_data(conversation.transitions)
    assert conversation.breaks == [] and conversation.token_factor == 1.0
    assert sum(row.response_mask) == sum(len(encoder.encode(each + end)) for each in written)
    for each, added in zip(written, messages[2::2], strict=True):
        assert text.count(each + end) == text.count(added["content"]) == 1
    header = encoder.text(messages[:1], add_generation_prompt=True).rpartition(messages[0]["content"])[2]
    assert text.endswith(added["content"] + header) or script == "calls"
