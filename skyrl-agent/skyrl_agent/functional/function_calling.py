"""Conversion of messages with calls in OpenAI's form to plain text (`function_xml`), and back. Published names."""

import copy
import json
import re
from collections.abc import Sequence

from skyrl_agent.types import Message, Row
from skyrl_gym.chat.function_xml import (
    FunctionCallConversionError,
    FunctionCallValidationError,
    read_call,
    render_example_call,
    result_text,
    system_suffix,
    write_call,
)
from skyrl_gym.tools.signature import Schema

__all__ = [
    "FunctionCallConversionError",
    "FunctionCallValidationError",
    "convert_fncall_messages_to_non_fncall_messages",
    "convert_non_fncall_messages_to_fncall_messages",
]

_RESULT = re.compile(r"EXECUTION RESULT of \[([^\]\n]{1,200})\]:\n")


def convert_fncall_messages_to_non_fncall_messages(
    messages: Sequence[Message], tools: Sequence[Schema], add_in_context_learning_example: bool = True
) -> list[Message]:
    """Convert messages with calls in OpenAI's form to messages of plain text: the functions are explained in the first
    system message (if there is one), calls are text, results are user messages.

    Raises:
        FunctionCallConversionError: a call is not in OpenAI's form, or a role is unknown.
    """
    converted: list[Message] = []
    explained = exemplified = False
    for message in copy.deepcopy(list(messages)):
        role, content = message.get("role"), message.get("content") or ""
        if role == "system" and not explained:
            explained, content = True, content + system_suffix(tools)
        elif role == "user" and add_in_context_learning_example and not exemplified:
            exemplified, content = True, render_example_call(tools) + content
        elif role == "assistant":
            texts = [_call_text(call) for call in message.get("tool_calls") or []]
            content = "\n\n".join(text for text in (content.rstrip() if texts else content, *texts) if text)
        elif role == "tool":
            role, content = "user", result_text(message.get("name") or "function", content)
        elif role not in ("system", "user"):
            raise FunctionCallConversionError(f"a message's role must be system, user, assistant or tool; got {role!r}")
        converted.append({"role": role, "content": content})
    return converted


def convert_non_fncall_messages_to_fncall_messages(
    messages: Sequence[Message], tools: Sequence[Schema]
) -> list[Message]:
    """Convert back: the first call of each response in OpenAI's form, results as tool messages. Ids are counted from
    toolu_01.

    Raises:
        FunctionCallConversionError, FunctionCallValidationError: see `read_call`.
    """
    converted: list[Message] = []
    suffix, example = system_suffix(tools), render_example_call(tools)
    last_id, count = "", 0
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        result = _RESULT.match(content) if role == "user" and last_id else None
        first = read_call(content, tools) if role == "assistant" else None
        if first:
            count += 1
            last_id = f"toolu_{count:02d}"
            function = {"name": first.call.name, "arguments": json.dumps(first.call.arguments, ensure_ascii=False)}
            call = {"index": 1, "id": last_id, "type": "function", "function": function}
            converted.append({"role": role, "content": content[: first.start].rstrip(), "tool_calls": [call]})
        elif result:
            output = content[result.end() :]
            converted.append({"role": "tool", "name": result[1], "content": output, "tool_call_id": last_id})
        else:
            text = content.removesuffix(suffix) if role == "system" else content
            converted.append({"role": role, "content": text.removeprefix(example) if role == "user" else text})
    return converted


def _call_text(tool_call: Row) -> str:
    try:
        function = tool_call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return write_call(function["name"], dict(arguments))
    except (KeyError, TypeError, ValueError) as error:
        raise FunctionCallConversionError(
            f"a tool call needs function.name and function.arguments, a JSON object; got {tool_call!r}"
        ) from error
