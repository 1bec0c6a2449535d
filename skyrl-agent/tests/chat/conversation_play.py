"""A model that answers in the spelling of its chat template, and is checked at each turn."""

from collections.abc import Sequence

from skyrl_agent.chat.conversation import Conversation
from skyrl_agent.chat.encoding import MessageEncoder
from skyrl_agent.types import Message, MetaInfo


def told(ids: Sequence[int] | None, reason: str = "stop") -> MetaInfo:
    return MetaInfo(
        output_tokens=None if ids is None else list(ids),
        finish_reason=reason,
        logprobs=None if ids is None else [-0.5] * len(ids),
    )


def spelling(encoder: MessageEncoder, script: Sequence[Message], index: int, end: str) -> str:
    """Return the text after which the template goes on as after `script[index]`. It keeps thoughts."""
    header = encoder.text(script[:index], add_generation_prompt=True)
    whole = encoder.text(script[: index + 2], add_generation_prompt=True)
    if "</think>" in script[index]["content"] or not whole.startswith(header) or end not in whole[len(header) :]:
        return script[index]["content"] + end
    return whole[len(header) : whole.index(end, len(header)) + len(end)]


def play(encoder: MessageEncoder, script: Sequence[Message], end: str, end_of_call: str | None = None) -> Conversation:
    """The whole script. What the model reads is at each turn what the template renders for all messages so far."""
    first = [message["role"] for message in script].index("assistant")
    conversation = Conversation(encoder, script[:first])
    for index, message in enumerate(script):
        if index < first:
            continue
        if message["role"] != "assistant":
            conversation.add(message)
            continue
        assert encoder.decode(conversation.input_ids()) == encoder.text(script[:index], add_generation_prompt=True)
        assert conversation.input_ids() == encoder.ids(script[:index])
        text = spelling(encoder, script, index, end_of_call if end_of_call and message.get("tool_calls") else end)
        conversation.add_answer(text, told(encoder.encode(text)), message)
    assert conversation.messages == list(script)
    return conversation
