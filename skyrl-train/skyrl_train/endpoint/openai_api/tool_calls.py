"""Tool formats of the endpoint, and conversion of API messages for chat templates.

A call that cannot be parsed stays in the text, so the agent can see it.
"""

import json
from collections.abc import Sequence
from typing import Literal

from skyrl_train.endpoint.errors import build_refusal
from skyrl_train.endpoint.openai_api.schema import Message
from skyrl_train.types import ConversationType, JsonObject, MessageType

ToolSyntax = Literal["hermes", "llama3_json"]
ToolFormatName = Literal["auto"] | ToolSyntax


def resolve_tool_syntax(name: ToolFormatName, chat_template: str | None) -> ToolSyntax:
    """Resolve `auto` to the tool call format that the chat template requests (Hermes if none)."""
    if name != "auto":
        return name
    template = chat_template or ""
    if "<tool_call>" not in template and ('"parameters"' in template or "<|python_tag|>" in template):
        return "llama3_json"
    return "hermes"


def convert_messages_for_template(messages: Sequence[Message]) -> ConversationType:
    """Convert API messages to the form that chat templates read: contents are texts, arguments of calls are objects.

    Raises:
        ApiError: a message has a part that is not text.
    """
    return [_convert_for_template(message, f"messages.{index}") for index, message in enumerate(messages)]


def _convert_for_template(message: Message, where: str) -> MessageType:
    given = message.model_dump(exclude_none=True)
    given["content"] = _join_text_parts(message.content, where)
    if message.role == "developer":  # OpenAI's newer name; templates know the older one
        given["role"] = "system"
    if message.tool_calls is None:
        return given
    given["tool_calls"] = []
    for call in message.tool_calls:
        arguments = call.function.arguments
        read = _parse_json(arguments) if isinstance(arguments, str) else arguments
        function = {"name": call.function.name, "arguments": read if isinstance(read, dict) else arguments}
        given["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return given


def _join_text_parts(content: str | list[JsonObject] | None, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise build_refusal(
                f"{where}.content: only parts of type text are supported; got {part.get('type')!r}", where
            )
    return "".join(part["text"] for part in content)


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
