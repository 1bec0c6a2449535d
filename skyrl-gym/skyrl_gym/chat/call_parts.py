"""Calls and what parsers of several formats share: JSON, spaces, thoughts."""

import json
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from skyrl_gym.graders.results import Invalid


@dataclass(frozen=True)
class ToolCall:
    """Well-formed call. Name and arguments are checked by the tool, not here."""

    name: str
    arguments: dict[str, object] = field(default_factory=dict)
    """Arguments by name; the name is `SOLE_ARGUMENT` in formats with one unnamed argument."""
    id: str | None = None


class Located(NamedTuple):
    call: ToolCall | Invalid
    start: int
    end: int
    """Characters `[start, end)` of the text hold the call with its tags."""


class Malformed(ValueError):
    """Malformed call. The text is addressed to the model."""


def _build_unique_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"{twice[:50]!r} is given twice")
    return dict(pairs)


_DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_build_unique_dict)  # models break lines inside strings
_SPACE = re.compile(r"\s*")


def skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def json_object(text: str, position: int) -> tuple[dict[str, object], int]:
    """Parse the object that starts at `position`. Returns the object and its end. Raises `Malformed`."""
    if not text.startswith("{", position):
        raise Malformed("a tool call must be a JSON object, beginning with {")
    try:
        value, end = _DECODER.raw_decode(text, position)
    except Malformed:
        raise
    except json.JSONDecodeError as failure:
        raise Malformed(f"not valid JSON: {failure.msg} at character {failure.pos - position}") from failure
    except (ValueError, RecursionError) as failure:  # a number of thousands of digits, thousands of brackets
        raise Malformed("not valid JSON: a number is too long or the nesting too deep") from failure
    return value, end


def parse_json_call(call: dict[str, object]) -> ToolCall:
    """Read a call from JSON, where `parameters` is another name of `arguments`. Raises `Malformed`."""
    name = call.get("name")
    if not isinstance(name, str) or not name.strip():
        raise Malformed('a tool call needs "name", the name of the tool')
    unknown = set(call) - {"name", "arguments", "parameters", "id", "type"}
    if unknown:
        raise Malformed(f'{min(unknown)[:50]!r} does not belong beside "name": put arguments inside "arguments"')
    if "arguments" in call and "parameters" in call:
        raise Malformed('a tool call has "arguments" or "parameters", not both')
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # an object written as text, as in OpenAI's responses
        arguments = parse_whole_json_object(arguments)
    if arguments is not None and not isinstance(arguments, dict):
        raise Malformed('"arguments" must be an object with a value for each argument name')
    identifier = call.get("id")
    return ToolCall(name.strip(), arguments or {}, identifier if isinstance(identifier, str) else None)


def parse_whole_json_object(text: str) -> dict[str, object]:
    """Parse a text that is one JSON object. Raises `Malformed`."""
    value, end = json_object(text, skip_space(text, 0))
    if skip_space(text, end) != len(text):
        raise Malformed("something follows after the JSON object")
    return value


def remove_thought(text: str) -> str:
    """Return the text after a thought, whose start may be in the prompt."""
    thought, end, rest = text.partition("</think>")
    if end:
        return rest
    return "" if thought.lstrip().startswith("<think>") else text
