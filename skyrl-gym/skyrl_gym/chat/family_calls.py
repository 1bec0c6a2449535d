"""Parsers of the call formats of model families. A call is enclosed in two marks; several calls may form a section.

- `deepseek` (V3, R1, V3.1): name and JSON, with a separator of special tokens between.
- `kimi` (K2): `functions.NAME:0` and JSON.
- `glm` (4.5 and later): name, then `<arg_key>` and `<arg_value>` in turn.
- `minimax` (M2): `<invoke name="...">` with `<parameter name="...">`.
- `gemma` (FunctionGemma, Gemma 4): `call:NAME{key:value}`, with special marks around text.
- `mistral`: `[TOOL_CALLS]` with a JSON list, or with `NAME[ARGS]{...}` for each call.

Text values stay text; the tool converts them by its schema.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from skyrl_gym.call_arguments import parse_text
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

MAX_EXCERPT = 50

Read = Callable[[str], ToolCall]
"""Text between the marks of a call -> the call. Raises Malformed."""


@dataclass(frozen=True)
class _Marks:
    """Special tokens around a call and around a section of calls. They are not part of the text.

    Args:
        turn_ends: special tokens that end an answer.
    """

    opening: str
    closing: str
    section: tuple[str, str] = ("", "")
    turn_ends: tuple[str, ...] = ()

    def calls(self, text: str, read: Read) -> Iterator[Located]:
        """Parse the calls of a text. The end of the text, or an end-of-turn token, closes the last call: a stop string
        may have removed the closing mark."""
        position = text.find(self.opening, len(text) - len(remove_thought(text)))
        while position >= 0:
            body = position + len(self.opening)
            end = text.find(self.closing, body)
            end = self._find_end_of_call(text, body) if end < 0 else end
            try:
                call: ToolCall | Invalid = read(text[body:end])
            except Malformed as failure:
                call = Invalid(f"Malformed tool call: {failure}")
            closed = end + len(self.closing) if text.startswith(self.closing, end) else len(text)
            yield Located(call, *self._add_section_mark(text, position, closed))
            position = text.find(self.opening, closed)

    def _find_end_of_call(self, text: str, body: int) -> int:
        """Find the end of the call that starts at `body` and has no closing mark."""
        kept = text.rstrip()
        end = next((kept.rfind(mark, body) for mark in self.turn_ends if kept.endswith(mark)), -1)
        return len(text) if end < body else end

    def _add_section_mark(self, text: str, start: int, end: int) -> tuple[int, int]:
        before, after = text[:start].rstrip(), skip_space(text, end)
        if self.section[0] and before.endswith(self.section[0]):
            start = len(before) - len(self.section[0])
        if self.section[1] and text.startswith(self.section[1], after):
            end = after + len(self.section[1])
        return start, end


def _check_name(text: str) -> str:
    name = text.strip()
    if not name or len(name.split()) > 1 or "<" in name:
        raise Malformed(f"a tool call begins with the name of the tool; got {name[:MAX_EXCERPT]!r}")
    return name


_DEEPSEEK = _Marks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("<｜end▁of▁sentence｜>",),
)


def _parse_deepseek_call(body: str) -> ToolCall:
    """Read `NAME<sep>{...}` (V3.1), or `function<sep>NAME` and a fenced block of JSON (V3, R1)."""
    first, found, rest = body.partition("<｜tool▁sep｜>")
    if not found:
        raise Malformed("between the name of the tool and its arguments stands <｜tool▁sep｜>")
    if first.strip() == "function" and not rest.lstrip().startswith("{"):
        name, fence, block = rest.partition("```json")
        if not fence:
            raise Malformed("the arguments stand in a block ```json ... ```")
        return ToolCall(_check_name(name), parse_whole_json_object(block.rpartition("```")[0] or block))
    return ToolCall(_check_name(first), parse_whole_json_object(rest))


_KIMI = _Marks(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|im_end|>",),
)


def _parse_kimi_call(body: str) -> ToolCall:
    identifier, found, arguments = body.partition("<|tool_call_argument_begin|>")
    if not found:
        raise Malformed("between functions.NAME:0 and the arguments stands <|tool_call_argument_begin|>")
    identifier = _check_name(identifier)
    name = identifier.removeprefix("functions.").partition(":")[0]
    return ToolCall(_check_name(name), parse_whole_json_object(arguments), identifier)


_GLM = _Marks("<tool_call>", "</tool_call>", turn_ends=("<|observation|>", "<|user|>", "<|endoftext|>"))
_GLM_ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)


def _parse_glm_call(body: str) -> ToolCall:
    name, found, rest = body.partition("<arg_key>")
    return ToolCall(_check_name(name), _parse_tagged_arguments(found + rest, _GLM_ARGUMENT, "</arg_value>"))


_MINIMAX = _Marks("<invoke ", "</invoke>", ("<minimax:tool_call>", "</minimax:tool_call>"), ("[e~[",))
_INVOKED = re.compile(r"name=[\"\']?([^\"\'>]+)[\"\']?\s*>")
_MINIMAX_ARGUMENT = re.compile(r"\s*<parameter name=[\"\']?([^\"\'>]+)[\"\']?\s*>")


def _parse_minimax_call(body: str) -> ToolCall:
    name = _INVOKED.match(body)
    if name is None:
        raise Malformed('write <invoke name="NAME">')
    return ToolCall(
        _check_name(name[1]), _parse_tagged_arguments(body[name.end() :], _MINIMAX_ARGUMENT, "</parameter>")
    )


def _parse_tagged_arguments(text: str, opening: re.Pattern[str], closing: str) -> dict[str, object]:
    """Read arguments as text between tags."""
    arguments: dict[str, object] = {}
    position = 0
    while found := opening.match(text, position):
        end = text.find(closing, found.end())
        if end < 0:
            raise Malformed(f"the value of {found[1][:MAX_EXCERPT]!r} is not closed by {closing}")
        _add(arguments, found[1].strip(), text[found.end() : end].removeprefix("\n").removesuffix("\n"))
        position = end + len(closing)
    if rest := text[position:].strip():
        raise Malformed(f"only arguments may stand in a call; there is {rest[:MAX_EXCERPT]!r}")
    return arguments


def _add(arguments: dict[str, object], name: str, value: object) -> None:
    if name in arguments:
        raise Malformed(f"{name[:MAX_EXCERPT]!r} is given twice")
    arguments[name] = value


_GEMMA = (
    (
        _Marks(
            "<start_function_call>", "<end_function_call>", turn_ends=("<start_function_response>", "<end_of_turn>")
        ),
        "<escape>",
    ),
    (_Marks("<|tool_call>", "<tool_call|>", turn_ends=("<turn|>",)), '<|"|>'),
)
_GEMMA_CALL = re.compile(r"\s*call:([\w.-]+)\{(.*)\}\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"\s*([\w.-]+)\s*:")


def _parse_gemma_call(body: str, mark: str) -> ToolCall:
    found = _GEMMA_CALL.fullmatch(body)
    if found is None:
        raise Malformed("write call:NAME{key:value}")
    arguments: dict[str, object] = {}
    text, position = found[2], 0
    while key := _GEMMA_KEY.match(text, position):
        value, position = _parse_gemma_value(text, skip_space(text, key.end()), mark)
        _add(arguments, key[1], value)
        position = skip_space(text, position)
        if not text.startswith(",", position):
            break
        position += 1
    if rest := text[position:].strip():
        raise Malformed(f"arguments are key:value, with commas between; there is {rest[:MAX_EXCERPT]!r}")
    return ToolCall(found[1], arguments)


def _parse_gemma_value(text: str, position: int, mark: str) -> tuple[object, int]:
    """Read a value: text between two marks; a list or object, in which the marks are quotes; anything else."""
    if text.startswith(mark, position):
        end = text.find(mark, position + len(mark))
        if end < 0:
            raise Malformed(f"text stands between two {mark}")
        return text[position + len(mark) : end], end + len(mark)
    if text[position : position + 1] in ("[", "{"):
        end = _find_closing(text, position, mark)
        parsed = parse_text(_to_json(text[position:end], mark))
        if parsed is None:
            raise Malformed(f"a list or an object cannot be read: {text[position:end][:MAX_EXCERPT]!r}")
        return parsed, end
    end = text.find(",", position)
    end = len(text) if end < 0 else end
    word = text[position:end].strip()
    parsed = parse_text(word)
    return (word if parsed is None and word not in ("null", "None") else parsed), end


def _find_closing(text: str, position: int, mark: str) -> int:
    depth, quoted = 0, False
    while position < len(text):
        if text.startswith(mark, position):
            quoted, position = not quoted, position + len(mark)
            continue
        if not quoted:
            depth += (text[position] in "[{") - (text[position] in "]}")
        position += 1
        if not depth:
            return position
    raise Malformed("a bracket is not closed")


def _to_json(text: str, mark: str) -> str:
    """Write a value as JSON: text between marks as strings, and names of members, which have no quotes, too."""
    parts = text.split(mark)
    for index, part in enumerate(parts):
        parts[index] = json.dumps(part) if index % 2 else re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', part)
    return "".join(parts)


def _parse_gemma(text: str) -> Iterator[Located]:
    for marks, quote in _GEMMA:
        if marks.opening in text:
            yield from marks.calls(text, lambda body, quote=quote: _parse_gemma_call(body, quote))
            return


_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\](\w+))?\s*\[ARGS\]\s*")


def _parse_mistral(text: str) -> Iterator[Located]:
    """Parse a JSON list after one mark, or one call after each mark."""
    mark = "[TOOL_CALLS]"
    position = text.find(mark, len(text) - len(remove_thought(text)))
    while position >= 0:
        body = skip_space(text, position + len(mark))
        following = text.find(mark, body)
        end = len(text) if following < 0 else following
        try:
            if text.startswith("[", body):
                calls, last = _parse_mistral_list(text, body)
            else:
                call, last = _parse_mistral_call(text, body)
                calls = [call]
            rest = text[last:end].strip().removeprefix("</s>")
            if rest:
                raise Malformed(f"nothing may follow a call; there is {rest[:MAX_EXCERPT]!r}")
        except Malformed as failure:
            calls = [Invalid(f"Malformed tool call: {failure}")]
        for call in calls:
            yield Located(call, position, end)
            position = end
        position = following


def _parse_mistral_list(text: str, position: int) -> tuple[list[ToolCall | Invalid], int]:
    calls: list[ToolCall | Invalid] = []
    position = skip_space(text, position + 1)
    while position < len(text) and not text.startswith("]", position):
        value, position = json_object(text, position)
        calls.append(parse_json_call(value))
        position = skip_space(text, position)
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
        elif position < len(text) and not text.startswith("]", position):
            raise Malformed("calls are separated by , and the list ends in ]")
    return calls or [Invalid("Malformed tool call: the list of calls is empty")], min(position + 1, len(text))


def _parse_mistral_call(text: str, position: int) -> tuple[ToolCall, int]:
    name = _MISTRAL_NAME.match(text, position)
    if name is None:
        raise Malformed("write [TOOL_CALLS]NAME[ARGS]{...}")
    arguments, end = json_object(text, name.end())
    return ToolCall(name[1], arguments, name[2]), end


PARSERS: dict[str, Callable[[str], Iterator[Located]]] = {
    "deepseek": lambda text: _DEEPSEEK.calls(text, _parse_deepseek_call),
    "glm": lambda text: _GLM.calls(text, _parse_glm_call),
    "kimi": lambda text: _KIMI.calls(text, _parse_kimi_call),
    "mistral": _parse_mistral,
    "minimax": lambda text: _MINIMAX.calls(text, _parse_minimax_call),
    "gemma": _parse_gemma,
}
