"""Tool formats: explanation of tools, parsing of calls, and messages of results. Uses only the schemas of tools."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from skyrl_gym.call_arguments import Schema
from skyrl_gym.chat import function_xml
from skyrl_gym.chat.template import Message
from skyrl_gym.chat.tool_calls import CallSyntax, Invalid, ToolCall, parse_tool_calls

__all__ = ["TOOL_FORMATS", "Invalid", "ToolCall", "ToolFormat"]

MALFORMED = "malformed_call"
"""Name of the tool in the message about a malformed call."""

Result = tuple[ToolCall | Invalid | None, str]
"""A call and its result; a malformed call and what is wrong with it; without a call: another text for the model."""


class ToolFormat(ABC):
    """Stateless. Schemas are in OpenAI's form."""

    schemas_in_template: ClassVar[bool]
    """The chat template explains the tools; otherwise the system message does."""
    keeps_special_tokens: ClassVar[bool] = False
    """Calls are made of special tokens: a server must be asked for text with them (`skip_special_tokens: false`)."""

    def system_suffix(self, schemas: Sequence[Schema]) -> str:
        """Render the end of the system message."""
        return ""

    @abstractmethod
    def parse(self, text: str, schemas: Sequence[Schema]) -> list[ToolCall | Invalid]:
        """Parse the calls in an answer, in order; each malformed one is an `Invalid` that says what to correct."""

    def answer_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Build the assistant message for the chat template: the model's own text, calls included."""
        return {"role": "assistant", "content": text}

    @abstractmethod
    def result_messages(self, results: Sequence[Result]) -> list[Message]:
        """Build the messages of an answer's results, in the order of its calls."""


class FunctionXML(ToolFormat):
    """`<function=name>` (`function_xml`), explained in the system message. One call a turn."""

    schemas_in_template = False

    def system_suffix(self, schemas: Sequence[Schema]) -> str:
        return function_xml.system_suffix(schemas)

    def parse(self, text: str, schemas: Sequence[Schema]) -> list[ToolCall | Invalid]:
        try:
            first = function_xml.read_call(text, schemas)
        except (function_xml.FunctionCallConversionError, function_xml.FunctionCallValidationError) as error:
            return [Invalid(f"Malformed function call: {error}")]
        if first is None:
            return []
        if not first.num_further:
            return [first.call]
        note = (
            f"Only the first function call of a message is run; {first.num_further} more ignored. "
            "Make one call a message."
        )
        return [first.call, Invalid(note)]

    def result_messages(self, results: Sequence[Result]) -> list[Message]:
        """Build one user message: some templates refuse two in a row."""
        texts = [
            function_xml.result_text(call.name, text) if isinstance(call, ToolCall) else text for call, text in results
        ]
        return [{"role": "user", "content": "\n\n".join(texts)}] if texts else []


class Native(ToolFormat):
    """Format of a model family. Results are tool messages; other texts are a user message after them."""

    schemas_in_template = True
    answers_malformed_calls = True
    """A malformed call stays in the answer's text, so that what is wrong with it is its result."""
    syntax: CallSyntax

    def parse(self, text: str, schemas: Sequence[Schema]) -> list[ToolCall | Invalid]:
        return list(parse_tool_calls(text, self.syntax))

    def result_messages(self, results: Sequence[Result]) -> list[Message]:
        messages: list[Message] = []
        for call, text in results:
            if isinstance(call, ToolCall):
                id = _call_id(call, len(messages))
                messages.append({"role": "tool", "name": call.name, "tool_call_id": id, "content": text})
            elif call is not None and self.answers_malformed_calls:
                id = _call_id(None, len(messages))
                messages.append({"role": "tool", "name": MALFORMED, "tool_call_id": id, "content": text})
        rest = [text for call, text in results if self._is_apart(call)]
        return [*messages, {"role": "user", "content": "\n\n".join(rest)}] if rest else messages

    def _is_apart(self, call: ToolCall | Invalid | None) -> bool:
        return call is None or (isinstance(call, Invalid) and not self.answers_malformed_calls)


class Hermes(Native):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several a turn: Hermes, Qwen, and Qwen3-Coder's."""

    syntax = "hermes"


class Llama3JSON(Native):
    """`{"name": ..., "parameters": {...}}` and nothing else."""

    syntax = "llama3_json"


class Marked(Native):
    """Calls between special tokens, which stay in the answer's text (`family_calls`).

    Args:
        syntax: of the calls.
    """

    keeps_special_tokens = True

    def __init__(self, syntax: CallSyntax) -> None:
        self.syntax = syntax


class Mistral(Native):
    """`[TOOL_CALLS]`. The template takes the calls of an answer, not their text: it counts messages without calls."""

    syntax = "mistral"
    keeps_special_tokens = True
    answers_malformed_calls = False

    def answer_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        if not calls:
            return {"role": "assistant", "content": text}
        content = text.partition("[TOOL_CALLS]")[0].strip()
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [_to_openai_call(call, index) for index, call in enumerate(calls)],
        }


class GptOss(Native):
    """Harmony: messages in channels. The template takes the parts of an answer, and one call of it."""

    syntax = "gpt_oss"
    keeps_special_tokens = True
    answers_malformed_calls = False

    def answer_message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        thought, final = _extract_channel(text, "analysis"), _extract_channel(text, "final")
        message: Message = {"role": "assistant", "content": final if not calls else ""}
        if thought:
            message["thinking"] = thought
        if calls:
            message["tool_calls"] = [_to_openai_call(call, index) for index, call in enumerate(calls)]
        return message


def _extract_channel(text: str, channel: str) -> str:
    """Return the text of an answer in a channel, without calls. A text without channels is final."""
    if "<|message|>" not in text:
        return text if channel == "final" else ""
    parts = []
    for message in text.split("<|start|>"):
        header, found, body = message.partition("<|message|>")
        if found and f"<|channel|>{channel}" in header and " to=" not in header:
            parts.append(body.partition("<|end|>")[0].partition("<|return|>")[0])
    return "\n".join(parts)


def _call_id(call: ToolCall | None, index: int) -> str:
    """Return the call's id, or one of nine letters and digits, which is all that Mistral's templates accept."""
    return (call and call.id) or f"call{index:05d}"


def _to_openai_call(call: ToolCall, index: int) -> Message:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": _call_id(call, index),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


TOOL_FORMATS: dict[str, ToolFormat] = {
    "function_xml": FunctionXML(),
    "hermes": Hermes(),
    "llama3_json": Llama3JSON(),
    "gpt_oss": GptOss(),
    "deepseek": Marked("deepseek"),
    "glm": Marked("glm"),
    "kimi": Marked("kimi"),
    "minimax": Marked("minimax"),
    "gemma": Marked("gemma"),
    "mistral": Mistral(),
}
