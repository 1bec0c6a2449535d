"""Messages with calls in OpenAI's form as messages of plain text (`tagged_calls`), and back. Published names."""

import copy
import json
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from skyrl_agent.errors import ConfigError
from skyrl_agent.functional.tagged_calls import (
    FunctionCallConversionError,
    FunctionCallValidationError,
    describe,
    in_context_example,
    read_call,
    result_text,
    system_suffix,
    write_call,
)
from skyrl_agent.types import Message

__all__ = [
    "STOP_WORDS",
    "FunctionCallConversionError",
    "FunctionCallValidationError",
    "convert_fncall_messages_to_non_fncall_messages",
    "convert_non_fncall_messages_to_fncall_messages",
    "convert_str_to_completion_format",
    "convert_tool_call_to_string",
    "convert_tools_to_description",
]

STOP_WORDS = ["</function"]
"""An answer that this ended is read as if the rest of the tag stood there."""

_RESULT = re.compile(r"EXECUTION RESULT of \[([^\]\n]{1,200})\]:\n")

convert_tools_to_description = describe


def convert_tool_call_to_string(tool_call: dict[str, Any]) -> str:
    """Of a call in OpenAI's form.

    Raises:
        FunctionCallConversionError: it is no such call.
    """
    try:
        function = tool_call["function"]
        arguments = function["arguments"]
        arguments = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        return write_call(function["name"], dict(arguments))
    except (KeyError, TypeError, ValueError) as error:
        raise FunctionCallConversionError(
            f"a tool call needs function.name and function.arguments, a JSON object; got {tool_call!r}"
        ) from error


def convert_fncall_messages_to_non_fncall_messages(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], add_in_context_learning_example: bool = True
) -> list[Message]:
    """Messages with calls in OpenAI's form as messages of plain text: the functions are explained in the first system
    message (where there is none, nowhere), calls are text, results are user messages.

    Raises:
        FunctionCallConversionError: a call is no call in OpenAI's form, or a role is unknown.
    """
    converted: list[Message] = []
    explained = exemplified = False
    for message in copy.deepcopy(list(messages)):
        role, content = message.get("role"), message.get("content") or ""
        if role == "system" and not explained:
            explained, content = True, content + system_suffix(tools)
        elif role == "user" and add_in_context_learning_example and not exemplified:
            exemplified, content = True, in_context_example(tools) + content
        elif role == "assistant":
            texts = [convert_tool_call_to_string(call) for call in message.get("tool_calls") or []]
            content = "\n\n".join(text for text in (content.rstrip() if texts else content, *texts) if text)
        elif role == "tool":
            role, content = "user", result_text(message.get("name") or "function", content)
        elif role not in ("system", "user"):
            raise FunctionCallConversionError(f"a message's role must be system, user, assistant or tool; got {role!r}")
        converted.append({"role": role, "content": content})
    return converted


def convert_non_fncall_messages_to_fncall_messages(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]]
) -> list[Message]:
    """The way back: the first call of each answer in OpenAI's form, results as tool messages. Ids are counted from
    toolu_01.

    Raises:
        FunctionCallConversionError, FunctionCallValidationError: of `read_call`.
    """
    converted: list[Message] = []
    suffix, example = system_suffix(tools), in_context_example(tools)
    last_id, count = "", 0
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        result = _RESULT.match(content) if role == "user" and last_id else None
        found = read_call(content, tools) if role == "assistant" else None
        if found:
            count += 1
            last_id = f"toolu_{count:02d}"
            function = {"name": found.call.name, "arguments": json.dumps(found.call.arguments, ensure_ascii=False)}
            call = {"index": 1, "id": last_id, "type": "function", "function": function}
            converted.append({"role": role, "content": content[: found.start].rstrip(), "tool_calls": [call]})
        elif result:
            output = content[result.end() :]
            converted.append({"role": "tool", "name": result[1], "content": output, "tool_call_id": last_id})
        else:
            text = content.removesuffix(suffix) if role == "system" else content
            converted.append({"role": role, "content": text.removeprefix(example) if role == "user" else text})
    return converted


def convert_str_to_completion_format(messages: Sequence[Message]) -> Any:
    """The one message as litellm's `ModelResponse`.

    Raises:
        ConfigError: litellm is not installed.
        ValueError: it is not one message.
    """
    if len(messages) != 1:
        raise ValueError(f"a completion has one message; got {len(messages)}")
    try:
        response = import_module("litellm").ModelResponse
    except ModuleNotFoundError as error:
        raise ConfigError(
            "convert_str_to_completion_format makes a response of litellm, which is not installed"
        ) from error
    return response(choices=[{"index": 0, "finish_reason": "stop", "message": dict(messages[0])}])
