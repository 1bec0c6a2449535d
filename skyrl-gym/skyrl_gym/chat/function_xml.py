"""Tool calls as tagged text, for models without a native call format:

    <function=NAME>
    <parameter=P>value</parameter>
    </function>

Tools are JSON schemas in OpenAI's form.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_gym.call_arguments import Schema, parse_text
from skyrl_gym.chat.tool_calls import ToolCall

_FUNCTION = re.compile(r"<function=([^<>\n]{1,200})>")
_CALL = re.compile(_FUNCTION.pattern + r"\n")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,200})>")
_SPACE = re.compile(r"\s*")
_EXCERPT_CHARACTERS = 80


class FunctionCallConversionError(ValueError):
    """Malformed call. The message tells the model what to correct."""


class FunctionCallValidationError(ValueError):
    """Call of an unknown function, or with parameters that do not fit. The message is addressed to the model."""


@dataclass(frozen=True)
class FirstCall:
    """First call in an answer, its position in the text, and the number of calls that follow it."""

    call: ToolCall
    start: int
    num_further: int


def read_call(text: str, tools: Sequence[Schema]) -> FirstCall | None:
    """Parse the first call in a model's text, or return None.

    The text before `</think>` is a thought. A value is text without one line break at each end; where the schema has
    another type it is read as JSON. The end of the text closes `</function>`, which a stop string may have removed.

    Raises:
        FunctionCallConversionError, FunctionCallValidationError: the message tells the model what to correct.
    """
    start = _find_end_of_thought(text)
    opening = _CALL.search(text, start)
    if opening is None:
        _check_line_break(text, start)
        return None
    name = opening[1].strip()
    values, end = _read_parameters(text, opening.end(), name)
    return FirstCall(
        ToolCall(name, _convert_arguments(name, values, tools)), opening.start(), len(_CALL.findall(text, end))
    )


def _find_end_of_thought(text: str) -> int:
    """Return the end of the thought, which may begin in the prompt. After `<parameter=` the tag is part of a value."""
    end = text.find("</think>")
    if text.lstrip().startswith("<think>"):
        return len(text) if end < 0 else end
    return end if end >= 0 and text.find("<parameter=", 0, end) < 0 else 0


def _check_line_break(text: str, start: int) -> None:
    opening = _FUNCTION.search(text, start)
    if opening and (text.find("</function", opening.end()) >= 0 or text.find("<parameter=", opening.end()) >= 0):
        raise FunctionCallConversionError(f"{opening[0]} must be followed by a line break")


def _read_parameters(text: str, position: int, function: str) -> tuple[dict[str, str], int]:
    """Return the values as text, and the end of the call."""
    values: dict[str, str] = {}
    position = _skip_space(text, position)
    while opening := _PARAMETER.match(text, position):
        end = text.find("</parameter>", opening.end())
        if end < 0:
            raise FunctionCallConversionError(f"<parameter={opening[1]}> is not closed by </parameter>")
        if opening[1] in values:
            raise FunctionCallConversionError(f"parameter {opening[1]!r} of {function!r} is given twice")
        values[opening[1]] = text[opening.end() : end].removeprefix("\n").removesuffix("\n")
        position = _skip_space(text, end + len("</parameter>"))
    rest = text[position : position + len("</function>")]
    if not "</function>".startswith(rest):
        raise FunctionCallConversionError(
            f"between <function={function}> and </function> only <parameter=name>value</parameter> may stand; "
            f"there is {_format_excerpt(text[position : position + 40])}"
        )
    return values, position + len(rest)


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _convert_arguments(name: str, values: dict[str, str], tools: Sequence[Schema]) -> dict[str, object]:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if name not in schemas:
        raise FunctionCallValidationError(f"there is no function {name!r}; there are: {', '.join(schemas) or 'none'}")
    properties = schemas[name].get("properties", {})
    for parameter in values:
        if parameter not in properties:
            takes = f"it takes {', '.join(properties)}" if properties else "it takes none"
            raise FunctionCallValidationError(f"function {name!r} has no parameter {parameter!r}; {takes}")
    missing = [parameter for parameter in schemas[name].get("required", []) if parameter not in values]
    if missing:
        raise FunctionCallValidationError(f"function {name!r} needs the parameter {missing[0]!r}, which is missing")
    return {
        key: _convert_value(properties[key], text, f"parameter {key!r} of {name!r}") for key, text in values.items()
    }


_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _convert_value(schema: Schema, text: str, where: str) -> object:
    """Convert a value to a type that the schema admits; text is the fallback."""
    types = _get_types(schema)
    if "enum" in schema:
        return _find_enum_member(schema["enum"], text, where)
    if types == {"string"}:
        return text
    parsed = parse_text(text)
    if type(parsed) is float and "integer" in types and parsed.is_integer():
        parsed = int(parsed)
    if (parsed is not None or text.strip() == "null") and any(type(parsed) in _KINDS.get(kind, ()) for kind in types):
        return parsed
    if not types or "string" in types:
        return text
    raise FunctionCallValidationError(f"{where} must be {' or '.join(sorted(types))}; got {_format_excerpt(text)}")


def _get_types(schema: Schema) -> set[str]:
    """Return JSON's names of the admitted types; empty: anything."""
    for union in ("anyOf", "oneOf"):
        if union in schema:
            arms = [_get_types(arm) for arm in schema[union]]
            return set().union(*arms) if all(arms) else set()
    kind = schema.get("type", [])
    return {kind} if isinstance(kind, str) else set(kind)


def _find_enum_member(members: Sequence[object], text: str, where: str) -> object:
    for candidate in (text, text.strip(), parse_text(text)):
        for member in members:
            if type(member) is type(candidate) and member == candidate:
                return member
    allowed = ", ".join(json.dumps(member) for member in members)
    raise FunctionCallValidationError(f"{where} must be one of {allowed}; got {_format_excerpt(text)}")


def _format_excerpt(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT_CHARACTERS else f"{text[:_EXCERPT_CHARACTERS]}...")


def write_call(name: str, arguments: Mapping[str, object]) -> str:
    """Render a call as `read_call` reads it. A multi-line value is enclosed in line breaks."""
    lines = [f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = f"\n{text}\n" if "\n" in text else text
        lines.append(f"<parameter={key}>{text}</parameter>")
    return "\n".join([*lines, "</function>"])


def describe(tools: Sequence[Schema]) -> str:
    """Render a numbered list of the functions for the system message."""
    return "\n".join(_describe_function(number, tool["function"]) for number, tool in enumerate(tools, start=1))


def _describe_function(number: int, function: Schema) -> str:
    parameters = function.get("parameters") or {}
    required = parameters.get("required", [])
    lines = [
        f"---- BEGIN FUNCTION #{number}: {function['name']} ----",
        f"Description: {function.get('description', '')}",
    ]
    properties = parameters.get("properties", {})
    lines.append("Parameters:" if properties else "No parameters.")
    for index, (name, schema) in enumerate(properties.items(), start=1):
        need = "required" if name in required else "optional"
        kind = " or ".join(sorted(_get_types(schema))) or "any"
        line = f"  ({index}) {name} ({kind}, {need}): {schema.get('description', '')}".rstrip()
        if "enum" in schema:
            line += f" Allowed values: {', '.join(json.dumps(value) for value in schema['enum'])}."
        lines.append(line)
    return "\n".join([*lines, f"---- END FUNCTION #{number} ----"])


def system_suffix(tools: Sequence[Schema]) -> str:
    """Render the end of the system message: the functions, and how to call them. Empty without functions."""
    if not tools:
        return ""
    return f"""

You can call these functions:

{describe(tools)}

To call one, end your message with a call in exactly this form:

<function=NAME>
<parameter=FIRST>value</parameter>
<parameter=SECOND>
a value
of several lines
</parameter>
</function>

Rules:
- There is one call in a message, and nothing after it; its result comes in the next message.
- A line break follows <function=NAME>. Each parameter is closed by </parameter>, the call by </function>.
- Required parameters are given. Values that are not text are written as JSON.
- Reasoning may stand before the call, never after it.
"""


def render_example_call(tools: Sequence[Schema]) -> str:
    """Render an example call of the first function."""
    if not tools:
        return ""
    function = tools[0]["function"]
    parameters = function.get("parameters") or {}
    values = {name: f"<{name}>" for name in parameters.get("required", [])}
    call, result = write_call(function["name"], values), result_text(function["name"], "...")
    return f"An example of a call:\n\n{call}\n\nand of what comes back:\n\n{result}\n\nNow the task:\n\n"


def result_text(name: str, output: str) -> str:
    """Render a call's result for the model."""
    return f"EXECUTION RESULT of [{name}]:\n{output}"
