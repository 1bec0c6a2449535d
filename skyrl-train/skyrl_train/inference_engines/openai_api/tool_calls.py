"""How models write tool calls into their text, and how calls and their results go back into a chat template.

A call that cannot be read stays in the text: an agent then sees what its model did.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from skyrl_train.inference_engines.openai_api.errors import refused
from skyrl_train.inference_engines.openai_api.schema import Message
from skyrl_train.types import ConversationType, MessageType

ToolFormatName = Literal["auto", "hermes", "llama3_json"]


@dataclass(frozen=True)
class ToolCall:
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """The text of an answer without its calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """How one family of models writes calls."""

    def parse(self, text: str) -> ParsedAnswer: ...

    def visible(self, text: str) -> str:
        """The beginning of an unfinished answer that is no part of a call, whatever follows."""
        ...


class HermesFormat:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, behind text or not (Qwen, Hermes)."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def parse(self, text: str) -> ParsedAnswer:
        content, calls, position = [], [], 0
        while (start := text.find(self._OPEN, position)) >= 0:
            end = text.find(self._CLOSE, start)
            if end < 0:
                break
            after = end + len(self._CLOSE)
            call = _call_of(_json_of(text[start + len(self._OPEN) : end]), ("arguments",))
            content.append(text[position:start] if call else text[position:after])
            calls += [call] if call else []
            position = after
        content.append(text[position:])
        if not calls:
            return ParsedAnswer(text)
        return ParsedAnswer("".join(content).rstrip(), tuple(calls))

    def visible(self, text: str) -> str:
        start = text.find(self._OPEN)
        if start >= 0:
            return text[:start].rstrip()
        for length in range(len(self._OPEN) - 1, 0, -1):
            if text.endswith(self._OPEN[:length]):
                return text[:-length].rstrip()
        return text.rstrip()  # a call may follow, before which white space goes


class Llama3Format:
    """The whole answer is `{"name": …, "parameters": {…}}`, or several of them with semicolons between (Llama 3.1 and
    later); a `<|python_tag|>` may stand before it."""

    _TAG = "<|python_tag|>"

    def parse(self, text: str) -> ParsedAnswer:
        rest = text.strip().removeprefix(self._TAG).strip()
        decoder, calls = json.JSONDecoder(), []
        while rest.startswith("{"):
            try:
                value, end = decoder.raw_decode(rest)
            except ValueError:
                break
            call = _call_of(value, ("parameters", "arguments"))
            if call is None:
                break
            calls.append(call)
            rest = rest[end:].strip().removeprefix(";").strip()
        return ParsedAnswer(text) if rest or not calls else ParsedAnswer("", tuple(calls))

    def visible(self, text: str) -> str:
        start = text.lstrip()
        may_be_call = not start or start.startswith(("{", self._TAG)) or self._TAG.startswith(start)
        return "" if may_be_call else text


_FORMATS: dict[str, type[HermesFormat] | type[Llama3Format]] = {"hermes": HermesFormat, "llama3_json": Llama3Format}


def tool_format(name: ToolFormatName, chat_template: str | None) -> ToolFormat:
    """A format by its name; `auto`: the one that the chat template asks the model for (Hermes if it asks for none)."""
    if name != "auto":
        return _FORMATS[name]()
    template = chat_template or ""
    if HermesFormat._OPEN not in template and ('"parameters"' in template or Llama3Format._TAG in template):
        return Llama3Format()
    return HermesFormat()


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any, names_of_arguments: Sequence[str]) -> ToolCall | None:
    """None if `value` is not a function's name with arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = next((value[name] for name in names_of_arguments if name in value), {})
    if isinstance(arguments, str):
        arguments = _json_of(arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def messages_for_template(messages: Sequence[Message]) -> ConversationType:
    """Messages of the API in the form that chat templates read: contents are texts, arguments of calls are objects.

    Raises:
        ApiError: a message has a part that is not text.
    """
    return [_for_template(message, f"messages.{index}") for index, message in enumerate(messages)]


def _for_template(message: Message, where: str) -> MessageType:
    given = message.model_dump(exclude_none=True)
    given["content"] = _text_of(message.content, where)
    if message.role == "developer":  # OpenAI's newer name; templates know the older one
        given["role"] = "system"
    if message.tool_calls is None:
        return given
    given["tool_calls"] = []
    for call in message.tool_calls:
        arguments = call.function.arguments
        read = _json_of(arguments) if isinstance(arguments, str) else arguments
        function = {"name": call.function.name, "arguments": read if isinstance(read, dict) else arguments}
        given["tool_calls"].append({"id": call.id, "type": "function", "function": function})
    return given


def _text_of(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise refused(f"{where}.content: only parts of type text are supported; got {part.get('type')!r}", where)
    return "".join(part["text"] for part in content)
