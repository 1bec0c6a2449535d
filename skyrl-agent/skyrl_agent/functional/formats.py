"""How a model writes calls and reads their results. Knows no tools but their schemas."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from skyrl_agent.errors import ConfigError
from skyrl_agent.functional import tagged_calls
from skyrl_agent.types import Message
from skyrl_gym.tools.calls import Invalid, ToolCall, parse_tool_calls

__all__ = ["FORMATS", "CallFormat", "Invalid", "ToolCall", "call_format"]

Result = tuple[ToolCall | None, str]
"""A call and what it came to; without a call: what else there is to say to the model."""


class CallFormat(ABC):
    """Stateless. Schemas are in OpenAI's form."""

    stop: ClassVar[tuple[str, ...]] = ()
    """Stop strings. Models end their turn after a call by themselves, so there are none."""
    schemas_in_template: ClassVar[bool]
    """The chat template explains the tools; otherwise the system message does."""
    keeps_special_tokens: ClassVar[bool] = False
    """Calls are made of special tokens: a server must be asked for text with them (`skip_special_tokens: false`)."""

    def system_suffix(self, schemas: Sequence[dict[str, Any]]) -> str:
        """What the system message ends with."""
        return ""

    @abstractmethod
    def parse(self, text: str, schemas: Sequence[dict[str, Any]]) -> list[ToolCall | Invalid]:
        """The calls in an answer, in order; in the place of one that cannot be read what the model should mend."""

    def answer_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """An answer as the chat template takes it: the model's own text, calls and all."""
        return {"role": "assistant", "content": text}

    @abstractmethod
    def result_messages(self, results: Sequence[Result]) -> list[Message]:
        """What came of an answer's calls, in their order."""


class FunctionXML(CallFormat):
    """`<function=name>` (`tagged_calls`), explained in the system message. One call a turn."""

    schemas_in_template = False

    def system_suffix(self, schemas: Sequence[dict[str, Any]]) -> str:
        return tagged_calls.system_suffix(schemas)

    def parse(self, text: str, schemas: Sequence[dict[str, Any]]) -> list[ToolCall | Invalid]:
        try:
            found = tagged_calls.read_call(text, schemas)
        except (tagged_calls.FunctionCallConversionError, tagged_calls.FunctionCallValidationError) as error:
            return [Invalid(f"Malformed function call: {error}")]
        if found is None:
            return []
        note = f"Only the first function call of a message is run; {found.more} more ignored. Make one call a message."
        return [found.call, Invalid(note)] if found.more else [found.call]

    def result_messages(self, results: Sequence[Result]) -> list[Message]:
        """One user message: some templates take no two in a row."""
        texts = [tagged_calls.result_text(call.name, text) if call else text for call, text in results]
        return [{"role": "user", "content": "\n\n".join(texts)}] if texts else []


class Native(CallFormat):
    """A format of models themselves. Results are tool messages, anything else is a user message after them."""

    schemas_in_template = True
    syntax: ClassVar[Literal["hermes", "llama3_json", "gpt_oss"]]

    def parse(self, text: str, schemas: Sequence[dict[str, Any]]) -> list[ToolCall | Invalid]:
        return list(parse_tool_calls(text, self.syntax))

    def result_messages(self, results: Sequence[Result]) -> list[Message]:
        calls = [(call, text) for call, text in results if call]
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "tool_call_id": _call_id(call, index), "content": text}
            for index, (call, text) in enumerate(calls)
        ]
        rest = "\n\n".join(text for call, text in results if not call)
        return [*messages, {"role": "user", "content": rest}] if rest else messages


class Hermes(Native):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several a turn: Hermes, Qwen, and Qwen3-Coder's."""

    syntax = "hermes"


class Llama3JSON(Native):
    """`{"name": ..., "parameters": {...}}` and nothing else."""

    syntax = "llama3_json"


class GptOss(Native):
    """Harmony: messages in channels. The template takes the parts of an answer, and one call of it."""

    syntax = "gpt_oss"
    keeps_special_tokens = True

    def answer_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        thought, final = _channel(text, "analysis"), _channel(text, "final")
        message: Message = {"role": "assistant", "content": final if not calls else ""}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [_openai_call(call, index) for index, call in enumerate(calls)]
        return message


def _channel(text: str, channel: str) -> str:
    """What an answer says in a channel, calls aside. A text without channels is final."""
    if "<|message|>" not in text:
        return text if channel == "final" else ""
    parts = []
    for message in text.split("<|start|>"):
        header, found, body = message.partition("<|message|>")
        if found and f"<|channel|>{channel}" in header and " to=" not in header:
            parts.append(body.partition("<|end|>")[0].partition("<|return|>")[0])
    return "\n".join(parts)


def _call_id(call: ToolCall, index: int) -> str:
    """Nine letters and digits where the model gave none: Mistral's templates take nothing else."""
    return call.id or f"call{index:05d}"


def _openai_call(call: ToolCall, index: int) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": _call_id(call, index),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


FORMATS: dict[str, CallFormat] = {
    "function_xml": FunctionXML(),
    "hermes": Hermes(),
    "llama3_json": Llama3JSON(),
    "gpt_oss": GptOss(),
}


def call_format(name: str) -> CallFormat:
    """
    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FORMATS:
        raise ConfigError(f"generator.tool_format must be one of {', '.join(FORMATS)}; got {name!r}")
    return FORMATS[name]
