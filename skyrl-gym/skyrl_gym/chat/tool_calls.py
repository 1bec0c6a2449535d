"""Parsers of tool calls in a model's text. See `tool_formats` for the messages around them.

The text must still contain the special tokens of the format (`skip_special_tokens=False`).
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from skyrl_gym.call_arguments import SOLE_ARGUMENT
from skyrl_gym.chat import family_calls
from skyrl_gym.chat.call_parts import (
    Located,
    Malformed,
    ToolCall,
    json_object,
    parse_json_call,
    parse_whole_json_object,
    remove_thought,
    skip_space,
)
from skyrl_gym.graders.results import Invalid

__all__ = ["CallSyntax", "Invalid", "ToolCall", "before_tool_calls", "parse_tool_calls", "split_tool_calls"]

MAX_CALLS = 100
"""Maximum number of calls read of one turn."""

CallSyntax = Literal[
    "xml", "hermes", "llama3_json", "gpt_oss", "deepseek", "glm", "kimi", "mistral", "minimax", "gemma"
]


def parse_tool_calls(text: str, format: CallSyntax) -> list[ToolCall | Invalid]:
    """Parse the calls in one turn of a model, in order; each malformed one is an `Invalid` that says what to correct.

    - `xml`: `<tool><name>argument</name></tool>`.
    - `hermes` (Hermes, Qwen): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and as Qwen3-Coder writes it
      `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, where values are text and
      the outer tags may be missing.
    - `llama3_json`: `{"name": ..., "parameters": {...}}` and nothing else, or after `<|python_tag|>`; several with `;`
      between.
    - `gpt_oss` (harmony, https://cookbook.openai.com/articles/openai-harmony): a message to `functions.name`.
    - `deepseek`, `glm`, `kimi`, `mistral`, `minimax`, `gemma`: `family_calls`.

    In all but `xml` and `gpt_oss` the text before `</think>` is a thought and has no calls. The end of the text
    closes the last tag or JSON value, which a stop string may have truncated. No text raises. The
    calls after the first `MAX_CALLS` are one `Invalid`.

    Raises:
        ValueError: `format` is unknown.
    """
    return [located.call for located in _find_calls(text, format)]


def split_tool_calls(text: str, format: CallSyntax) -> tuple[str, list[ToolCall]]:
    """Split one turn into its text without the calls, and the calls. A malformed call stays in the text; in
    `llama3_json`, where calls are the whole answer, one malformed call leaves all of it text."""
    located = _find_calls(text, format)
    if format == "llama3_json" and any(isinstance(call, Invalid) for call, _, _ in located):
        return text, []
    content, calls, position = [], [], 0
    for call, start, end in located:
        if isinstance(call, ToolCall):
            content.append(text[position:start])
            calls.append(call)
            position = end
    return ("".join([*content, text[position:]]).rstrip(), calls) if calls else (text, [])


def before_tool_calls(text: str, format: Literal["hermes", "llama3_json"]) -> str:
    """Return the beginning of an unfinished turn that stays text whatever follows: the text before anything that may
    become a call, without the white space before it."""
    start = len(text) - len(remove_thought(text))
    if format == "llama3_json" and text[start:].lstrip()[:1] in ("", "{"):
        return text[:start].rstrip()
    openings = (_CALL_OPEN, "<function=") if format == "hermes" else (_PYTHON_TAG,)
    end = min((at for opening in openings if (at := text.find(opening, start)) >= 0), default=len(text))
    held = max(n for opening in openings for n in range(len(opening)) if text.endswith(opening[:n], start, end))
    return text[: end - held].rstrip()


def _find_calls(text: str, format: CallSyntax) -> list[Located]:
    if format not in _PARSERS:
        raise ValueError(f"format must be one of {', '.join(_PARSERS)}; got {format!r}")
    calls = list(islice(_PARSERS[format](text), MAX_CALLS + 1))
    if len(calls) > MAX_CALLS:
        calls[-1] = calls[-1]._replace(call=Invalid(f"Malformed tool call: more than {MAX_CALLS} calls in one turn"))
    return calls


# xml

_TAG = re.compile(r"<(/?)(\w+)>")


def _parse_xml(text: str) -> Iterator[Located]:
    position = text.find("<tool>")
    while position >= 0:
        start = position + len("<tool>")
        end = text.find("</tool>", start)
        if end < 0:
            yield Located(Invalid("No <tool>...</tool> block: <tool> is not closed by </tool>"), position, len(text))
            return
        yield Located(_parse_xml_call(text[start:end]), position, end + len("</tool>"))
        position = text.find("<tool>", end)


def _parse_xml_call(body: str) -> ToolCall | Invalid:
    """Parse the first tag that is closed: its name is the tool's, its content the argument."""
    tags = list(_TAG.finditer(body))
    closing: defaultdict[str, list[int]] = defaultdict(list)
    for tag in tags:
        if tag[1]:
            closing[tag[2]].append(tag.start())
    for tag in tags:
        ends = closing[tag[2]]
        index = bisect_left(ends, tag.end())
        if not tag[1] and index < len(ends):
            return ToolCall(tag[2], {SOLE_ARGUMENT: body[tag.end() : ends[index]].strip()})
    return Invalid("No valid inner tool tag: write <tool><name>argument</name></tool> with the tool's name")


# hermes

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")


def _parse_hermes(text: str) -> Iterator[Located]:
    first = len(text) - len(remove_thought(text))
    position = text.find(_CALL_OPEN, first)
    if position < 0:
        yield from _parse_bare_functions(text, first)
    while position >= 0:
        start = skip_space(text, position + len(_CALL_OPEN))
        try:
            call, end = (
                _parse_function_call(text, start) if text.startswith("<", start) else _parse_hermes_call(text, start)
            )
            end = skip_space(text, end)
            if end < len(text) and not text.startswith((_CALL_CLOSE, "<|im_end|>"), end):
                raise Malformed(f"a call must be followed by {_CALL_CLOSE}")
        except Malformed as failure:
            call = Invalid(f"Malformed tool call: {failure}")
            end = text.find(_CALL_CLOSE, start)
            end = len(text) if end < 0 else end
        end += len(_CALL_CLOSE) if text.startswith(_CALL_CLOSE, end) else 0
        yield Located(call, position, end)
        position = text.find(_CALL_OPEN, end)


def _parse_hermes_call(text: str, start: int) -> tuple[ToolCall, int]:
    value, end = json_object(text, start)
    return parse_json_call(value), end


def _parse_bare_functions(text: str, first: int) -> Iterator[Located]:
    """Parse calls without `<tool_call>`, which Qwen3-Coder omits at times."""
    position = text.find("<function=", first) if text.find("</function>", first) >= 0 else -1
    while position >= 0:
        try:
            call, end = _parse_function_call(text, position)
        except Malformed as failure:
            call, end = Invalid(f"Malformed tool call: {failure}"), position + 1
        yield Located(call, position, end)
        position = text.find("<function=", end)


def _parse_function_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Parse Qwen3-Coder's form, in which each value is text enclosed in line breaks."""
    function = _FUNCTION.match(text, start)
    if function is None:
        raise Malformed('write {"name": ..., "arguments": {...}} or <function=name>...</function> in a tool call')
    arguments: dict[str, object] = {}
    position = skip_space(text, function.end())
    while parameter := _PARAMETER.match(text, position):
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            raise Malformed(f"<parameter={parameter[1][:50]}> is not closed by </parameter>")
        value = text[parameter.end() : end]
        if parameter[1] in arguments:
            raise Malformed(f"{parameter[1][:50]!r} is given twice")
        arguments[parameter[1]] = value.removeprefix("\n").removesuffix("\n")
        position = skip_space(text, end + len("</parameter>"))
    if not text.startswith("</function>", position):
        raise Malformed("<function=...> must hold <parameter=key>value</parameter> only, and end in </function>")
    return ToolCall(function[1], arguments), position + len("</function>")


# llama3_json

_PYTHON_TAG = "<|python_tag|>"
_LLAMA_ENDS = ("<|eom_id|>", "<|eot_id|>", "<|end_of_text|>")


def _parse_llama3_json(text: str) -> Iterator[Located]:
    thought_end = len(text) - len(remove_thought(text))
    tag = text.find(_PYTHON_TAG, thought_end)
    begin = tag if tag >= 0 else thought_end
    ends = [at for token in _LLAMA_ENDS if (at := text.find(token, begin)) >= 0]
    body = text[: min(ends, default=len(text))]
    position = skip_space(body, tag + len(_PYTHON_TAG) if tag >= 0 else begin)
    if tag < 0 and not _is_llama_call(body, position):
        return
    while True:
        try:
            value, end = json_object(body, position)
            call = parse_json_call(value)
        except Malformed as failure:
            yield Located(Invalid(f"Malformed tool call: {failure}"), begin, len(text))
            return
        position = skip_space(body, end)
        if position < len(body) and body[position] != ";":
            yield Located(call, begin, end)
            failure = "several calls are separated by ; and nothing else stands beside them"
            yield Located(Invalid(f"Malformed tool call: {failure}"), end, len(text))
            return
        following = skip_space(body, position + 1)
        yield Located(call, begin, following if following < len(body) else len(text))
        if following >= len(body):
            return
        begin = position = following


def _is_llama_call(body: str, position: int) -> bool:
    """Test for a call: an answer may be JSON too, so a call has a name, or would have if it were valid JSON."""
    if not body.startswith("{", position):
        return False
    try:
        return "name" in json_object(body, position)[0]
    except Malformed:
        return '"name"' in body


# gpt_oss

_MESSAGE_END = re.compile(r"<\|(?:call|end|return|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_AUTHOR = re.compile(r"\s*([\w.-]+)")


def _parse_gpt_oss(text: str) -> Iterator[Located]:
    """Parse `<|start|>header<|message|>content<|end|>`. The first header starts in the prompt; the recipient is in the
    header, before or after the channel."""
    position = 0
    while True:
        body = text.find("<|message|>", position)
        if body < 0:
            return
        header = text[position:body].rpartition("<|start|>")
        start = position + len(header[0])
        body += len("<|message|>")
        end = _MESSAGE_END.search(text, body)
        content = text[body : end.start() if end else len(text)]
        recipient = _RECIPIENT.search(header[2])
        if recipient and recipient[1] != "assistant" and _is_by_assistant(header[2], bool(header[1])):
            call = _parse_harmony_call(recipient[1], content, is_json="json" in header[2])
            yield Located(call, start, end.end() if end else len(text))
        if end is None:
            return
        position = end.end() if end[0] != "<|start|>" else end.start()


def _is_by_assistant(header: str, is_whole: bool) -> bool:
    """Test the author: a result, the tool's message to the assistant, is no call."""
    author = _AUTHOR.match(header)
    return not is_whole or (author is not None and author[1] == "assistant")


def _parse_harmony_call(recipient: str, content: str, is_json: bool) -> ToolCall | Invalid:
    """Read a call: `functions.name` takes JSON; built-in tools such as `python` may take plain text."""
    name = recipient.removeprefix("functions.")
    if not name:
        return Invalid("Malformed tool call: the recipient must be functions.NAME with the tool's name")
    try:
        return ToolCall(name, parse_whole_json_object(content) if content.strip() else {})
    except Malformed as failure:
        if name == recipient and not is_json:
            return ToolCall(name, {SOLE_ARGUMENT: content})
        return Invalid(f"Malformed tool call to {recipient[:100]}: {failure}")


_PARSERS: dict[str, Callable[[str], Iterator[Located]]] = {
    "xml": _parse_xml,
    "hermes": _parse_hermes,
    "llama3_json": _parse_llama3_json,
    "gpt_oss": _parse_gpt_oss,
    **family_calls.PARSERS,
}
