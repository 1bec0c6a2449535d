"""Conversion of Responses API requests to chat requests. The items of one response (reasoning, message, calls) become
the original assistant message, so the sampled tokens are reused.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

from skyrl_train.endpoint.errors import build_refusal
from skyrl_train.endpoint.openai_api.responses_schema import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    MessageItem,
    NamedTool,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    build_unsupported_item_error,
    extract_texts,
    get_full_name,
    parse_item,
)
from skyrl_train.endpoint.openai_api.schema import ChatRequest, parse_fields
from skyrl_train.endpoint.openai_api.thoughts import add_thought
from skyrl_train.types import JsonObject

SOLE_INPUT = "input"
"""Argument of the function that represents a custom tool and receives its text input."""

_PARAGRAPH = "\n\n"
_ENCRYPTED = "skyrl-thought."


def convert_request(request: ResponsesRequest, items: Sequence[JsonObject]) -> ChatRequest:
    """Translate a request. Raises ApiError.

    Args:
        items: the conversation, including the one of `previous_response_id`.
    """
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    values: JsonObject = {
        "model": request.model,
        "messages": _join_system_messages([*instructions, *_Messages().convert(items)]),
        "stream": bool(request.stream),
    }
    given = {
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "session_id": request.session_id,
        "reasoning_effort": request.effort,
        "response_format": _convert_response_format(request.text.format if request.text else None),
        "tool_choice": _convert_tool_choice(request.tool_choice),
    }
    if request.tools:
        given["tools"] = [_convert_function(named) for named in request.named_tools]
        given["parallel_tool_calls"] = request.parallel_tool_calls
    return parse_fields(ChatRequest, values | {name: value for name, value in given.items() if value is not None})


def _convert_response_format(form: TextFormat | None) -> JsonObject | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": form.name, "schema": form.json_schema, "description": form.description, "strict": form.strict}
    given = {name: value for name, value in schema.items() if value is not None}
    return {"type": "json_schema", "json_schema": given}


def _convert_function(named: NamedTool) -> JsonObject:
    tool = named.tool
    parameters, description = tool.parameters, tool.description or ""
    if tool.type == "custom":
        text = {"type": "string", "description": "The tool's whole input, as plain text"}
        parameters = {"type": "object", "properties": {SOLE_INPUT: text}, "required": [SOLE_INPUT]}
        grammar = (tool.format or {}).get("definition")
        description += f"\n\nThe input is written in this grammar:\n{grammar}" if grammar else ""
    function: JsonObject = {"name": named.full_name, "description": description, "parameters": parameters or {}}
    return {"type": "function", "function": function if tool.strict is None else function | {"strict": tool.strict}}


def _convert_tool_choice(choice: str | JsonObject | None) -> object:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") not in ("function", "custom") or not isinstance(choice.get("name"), str):
        raise build_refusal(
            f"tool_choice={choice!r} is not supported; use auto, none, required or a function's name",
            "tool_choice",
            "unsupported_value",
        )
    return {"type": "function", "function": {"name": get_full_name(choice.get("namespace"), choice["name"])}}


def _join_system_messages(messages: list[JsonObject]) -> list[JsonObject]:
    """Join the leading system messages: agents send instructions in pieces, templates accept one message."""
    texts = []
    while messages and messages[0]["role"] in ("system", "developer"):
        texts.append(messages.pop(0)["content"])
    return [{"role": "system", "content": _PARAGRAPH.join(texts)}, *messages] if texts else messages


class _Messages:
    """Chat messages built from items, in order."""

    def __init__(self) -> None:
        self._messages: list[JsonObject] = []
        self._answer: _AnswerItems | None = None
        self._open_calls: dict[str, str] = {}

    def convert(self, items: Sequence[JsonObject]) -> list[JsonObject]:
        """Translate items. Raises ApiError."""
        for index, item in enumerate(items):
            self._add(item, f"input[{index}]")
        self._close_answer()
        if self._open_calls:
            call = next(iter(self._open_calls))
            raise build_refusal(f"No tool output found for function call {call}.", "input")
        return self._messages

    def _add(self, item: JsonObject, where: str) -> None:
        kind: Any = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            message = parse_item(MessageItem, item, where)
            texts = extract_texts(message.content, where)
            if message.role == "assistant":
                self._get_answer_items(1).text += "".join(texts)
            else:
                self._close_answer()
                self._messages.append({"role": message.role, "content": _PARAGRAPH.join(texts)})
        elif kind == "reasoning":
            self._get_answer_items(0).thought = _decode_thought(parse_item(ReasoningItem, item, where), where)
        elif kind == "function_call":
            call = parse_item(CallItem, item, where)
            self._call(call.call_id, call.full_name, call.arguments)
        elif kind == "custom_tool_call":
            custom = parse_item(CustomCallItem, item, where)
            self._call(custom.call_id, custom.full_name, json.dumps({SOLE_INPUT: custom.input}))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._convert_output(parse_item(CallOutputItem, item, where), where)
        else:
            raise build_unsupported_item_error(kind, where)

    def _get_answer_items(self, rank: int) -> "_AnswerItems":
        """Return the response that an item of this rank belongs to: reasoning, message and calls in this order, at most
        one of each except calls.
        """
        if self._answer is not None and (rank < self._answer.rank or (rank == self._answer.rank and rank < 2)):
            self._close_answer()
        if self._answer is None:
            self._answer = _AnswerItems()
        self._answer.rank = rank
        return self._answer

    def _call(self, identifier: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self._get_answer_items(2).calls.append({"id": identifier, "type": "function", "function": function})
        self._open_calls[identifier] = name

    def _convert_output(self, output: CallOutputItem, where: str) -> None:
        self._close_answer()
        if self._open_calls.pop(output.call_id, None) is None:
            raise build_refusal(
                f"No tool call found for function call output with call_id {output.call_id}.", f"{where}.call_id"
            )
        content = "\n".join(extract_texts(output.output, where))
        self._messages.append({"role": "tool", "tool_call_id": output.call_id, "content": content})

    def _close_answer(self) -> None:
        if self._answer is not None:
            self._messages.append(self._answer.message())
        self._answer = None


class _AnswerItems:
    """Items of one response."""

    def __init__(self) -> None:
        self.rank = -1
        self.thought: str | None = None
        self.text = ""
        self.calls: list[JsonObject] = []

    def message(self) -> JsonObject:
        content = self.text if self.thought is None else add_thought(self.thought, self.text)
        message: JsonObject = {"role": "assistant", "content": content}
        return message | {"tool_calls": self.calls} if self.calls else message


def encode_thought(thought: str) -> str:
    """Encode a thought as the opaque text that clients send back."""
    return _ENCRYPTED + base64.b64encode(thought.encode()).decode()


def _decode_thought(item: ReasoningItem, where: str) -> str | None:
    if item.content is not None and item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content is None:
        return None
    try:
        return base64.b64decode(item.encrypted_content.removeprefix(_ENCRYPTED), validate=True).decode()
    except ValueError as error:
        raise build_refusal(
            f"{where}.encrypted_content: The encrypted content could not be verified.",
            f"{where}.encrypted_content",
            "invalid_encrypted_content",
        ) from error
