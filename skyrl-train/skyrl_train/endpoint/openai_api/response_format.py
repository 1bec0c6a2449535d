"""Output format of a chat response (`response_format`, `tool_choice`, `parallel_tool_calls`) as an engine constraint.

The constraint covers the whole completion: a thought may precede the constrained part, and tool calls have the format
that the chat template requests from the model (`tool_calls.py`), with arguments that satisfy the tools' schemas.
Grammars are in llguidance's Lark.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_train.endpoint.errors import ApiError, build_refusal
from skyrl_train.endpoint.openai_api.prompts import EndpointTemplate
from skyrl_train.endpoint.openai_api.schema import ChatRequest
from skyrl_train.endpoint.openai_api.thoughts import THOUGHT_CLOSE, THOUGHT_OPEN, is_inside_thought
from skyrl_train.endpoint.openai_api.tool_calls import ToolSyntax
from skyrl_train.inference_engines.constraints import Constraint, add_whitespace_bound
from skyrl_train.types import JsonObject

MAX_CALLS = 32
"""Maximum number of tool calls in a constrained response."""

_ANY_TEXT = r"(.|\n)*"
_CALL_OPEN, _CALL_CLOSE, _FUNCTION_OPEN = "<tool_call>", "</tool_call>", "<function="

ThoughtMode = Literal["none", "open", "possible"]
"""Thought before the response: `open`: begun in the prompt; `possible`: the model may begin one."""


@dataclass(frozen=True)
class OutputFormat:
    """Output format of a request."""

    schema: JsonObject | None
    """JSON schema of the text; None: any text."""
    calls: Literal["none", "auto", "required"]
    functions: tuple[JsonObject, ...]
    """Functions that may be called."""
    parallel: bool
    """Several calls in one response are permitted."""

    @property
    def param(self) -> str | None:
        """Request field that requires the constraint; None: no constraint."""
        if self.schema is not None:
            return "response_format"
        if self.calls == "required":
            return "tool_choice"
        return "parallel_tool_calls" if self.calls == "auto" and not self.parallel else None


def parse_output_format(request: ChatRequest) -> OutputFormat:
    """Parse the output format of a request. Raises ApiError."""
    functions = [tool.function for tool in request.tools or []]
    calls, names = _parse_tool_choice(request.tool_choice)
    known = [str(function.get("name")) for function in functions]
    if (calls == "required" or names) and not functions:
        raise build_refusal("tool_choice is only allowed when tools are given", "tool_choice")
    if unknown := sorted(set(names or ()) - set(known)):
        raise build_refusal(f"tool_choice names {unknown[0]!r}; the tools are {', '.join(known)}", "tool_choice")
    if names is not None:
        functions = [function for function in functions if function.get("name") in names]
    form = OutputFormat(
        schema=_parse_schema(request.response_format),
        calls=calls if functions else "none",
        functions=tuple(functions),
        parallel=request.parallel_tool_calls is not False,
    )
    if form.param is not None and request.continue_final_message:
        raise build_refusal(
            f"{form.param} constrains full completions and cannot be combined with continue_final_message=true",
            form.param,
        )
    return form


def get_thought_mode(template: EndpointTemplate, prompt: str) -> ThoughtMode:
    """Return whether a completion of this prompt may begin with a thought."""
    if is_inside_thought(prompt):
        return "open"
    is_closed = prompt.rstrip().endswith(THOUGHT_CLOSE)  # as templates do where thinking is turned off
    return "possible" if THOUGHT_CLOSE in (template.source or "") and not is_closed else "none"


def build_constraint(
    form: OutputFormat, thought: ThoughtMode, template: EndpointTemplate, syntax: ToolSyntax
) -> Constraint | None:
    """Build the constraint for this format; None if none is needed. Raises ApiError if it is too large."""
    if form.param is None:
        return None
    try:
        if form.schema is not None and form.calls == "none" and thought == "none":
            return Constraint.parse({"json_schema": form.schema})
        for function in form.functions:
            Constraint.parse({"json_schema": _get_parameters(function)})
        return Constraint.parse({"lark": _Grammar(form, thought, template, syntax).text()})
    except ValueError as error:
        raise build_refusal(f"{form.param}: {error}", form.param) from error


# Parsing of requests

_OBJECT: JsonObject = {"type": "object"}


def _parse_schema(given: object) -> JsonObject | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _OBJECT
    if kind != "json_schema" or not isinstance(given, Mapping):
        raise _build_error("response_format", given, "{'type': 'text' | 'json_object' | 'json_schema', …}")
    described = given.get("json_schema")
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        raise _build_error("response_format.json_schema", described, "an object with name and schema")
    schema = described.get("schema", _OBJECT)
    if not isinstance(schema, dict):
        raise _build_error("response_format.json_schema.schema", schema, "a JSON schema, an object")
    return schema


def _parse_tool_choice(given: object) -> tuple[Literal["none", "auto", "required"], list[str] | None]:
    """Parse `tool_choice`. Returns whether calls are required, and the permitted function names (None: all)."""
    match given:
        case None | "auto":
            return "auto", None
        case "none":
            return "none", None
        case "required":
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*tools]}}:
            names = [_get_function_name(tool) for tool in tools]
            if None not in names:
                return mode, [name for name in names if name is not None]
    raise _build_error(
        "tool_choice", given, "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}"
    )


def _get_function_name(tool: object) -> str | None:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return None


def _build_error(where: str, given: object, rule: str) -> ApiError:
    return build_refusal(f"{where} must be {rule}; got {str(given)[:100]!r}", where.split(".")[0], "invalid_value")


def _get_parameters(function: JsonObject) -> JsonObject:
    schema: Any = function.get("parameters")
    return schema if isinstance(schema, dict) and schema else _OBJECT


# Construction of grammars


class _Grammar:
    """Builder of the rules of one grammar. Rule `start` is the whole completion."""

    def __init__(self, form: OutputFormat, thought: ThoughtMode, template: EndpointTemplate, syntax: ToolSyntax):
        self._form = form
        self._thought = thought
        self._special = set(template.tokenizer.all_special_tokens)
        self._writes_xml = syntax == "hermes" and _FUNCTION_OPEN in (template.source or "")
        self._syntax = syntax
        self._rules: dict[str, str] = {"ws": r"/[ \n]{0,4}/"}

    def text(self) -> str:
        body = self._add_body()
        if self._thought != "none":
            end = self._add_text_up_to("thought", THOUGHT_CLOSE)
            opened = f"{end} ws"
            body = (
                f"{opened} ({body})"
                if self._thought == "open"
                else f"({self._format_tag(THOUGHT_OPEN)} {opened})? ({body})"
            )
        rules = {"start": body} | self._rules
        return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _add_body(self) -> str:
        form = self._form
        if form.calls == "none":
            return f"{self._add_json('answer', form.schema or _OBJECT)} ws"
        if form.schema is not None:
            alternatives = (
                [self._add_calls()]
                if form.calls == "required"
                else [self._add_json("answer", form.schema), self._add_calls()]
            )
            return f"({' | '.join(alternatives)}) ws"
        return f"{self._add_calls()} ws" if form.calls == "required" else self._add_text_or_call()

    def _add_calls(self) -> str:
        call = f"({' | '.join(self._call(index) for index in range(len(self._form.functions)))})"
        self._rules["call"] = call
        if not self._form.parallel:
            return "call"
        between = '";" ws' if self._syntax == "llama3_json" else "ws"
        return f"call ({between} call){{0,{MAX_CALLS - 1}}}"

    def _add_text_or_call(self) -> str:
        """Add a rule for text without a call, or with one call at its end. Returns its name."""
        if self._syntax == "llama3_json":  # a call is a complete response
            self._rules["PLAIN"] = rf"/([^{{ \n]{_ANY_TEXT})?/"
            return f"PLAIN | {self._add_call()} ws"
        if _CALL_OPEN in self._special:
            self._rules["PLAIN"] = f"/{_ANY_TEXT}/"
            return f"PLAIN ({self._add_call()} ws)?"
        self._rules["PLAIN"] = f"/{_ANY_TEXT}/ & ~/{_ANY_TEXT}{_CALL_OPEN}{_ANY_TEXT}/"
        self._rules["opened[lazy]"] = f"/{_ANY_TEXT}{_CALL_OPEN}/"
        return f"PLAIN | opened ({self._add_call(is_open=True)}) ws"

    def _add_call(self, is_open: bool = False) -> str:
        return " | ".join(self._call(index, is_open) for index in range(len(self._form.functions)))

    def _call(self, index: int, is_open: bool = False) -> str:
        """Return the pattern of one call of function `index`, without its opening tag if that is generated already."""
        function = self._form.functions[index]
        name, schema = str(function.get("name")), _get_parameters(function)
        if self._syntax == "llama3_json":
            return self._add_json_call(index, name, schema, "parameters")
        inner = (
            self._add_xml_call(index, name, schema)
            if self._writes_xml
            else self._add_json_call(index, name, schema, "arguments")
        )
        opening = "" if is_open else f"{self._format_tag(_CALL_OPEN)} "
        return f"{opening}ws {inner} ws {self._format_tag(_CALL_CLOSE)}"

    def _add_json_call(self, index: int, name: str, schema: JsonObject, key: str) -> str:
        arguments = self._add_json(f"arguments_{index}", schema)
        parts = ["{", json.dumps("name"), ":", json.dumps(name), ",", json.dumps(key), ":"]
        return f"{' ws '.join(json.dumps(part) for part in parts)} ws {arguments} ws {json.dumps('}')}"

    def _add_xml_call(self, index: int, name: str, schema: JsonObject) -> str:
        """Add a call in Qwen3-Coder's format, with each argument as text between tags."""
        required: Any = schema.get("required") or []
        properties: Any = schema.get("properties") or {}
        if not isinstance(required, list) or not isinstance(properties, dict):
            raise ValueError(f"parameters of the function {name!r} must have an object `properties`, a list `required`")
        written = []
        for number, (key, value) in enumerate(properties.items()):
            argument = (
                f"{json.dumps(f'<parameter={key}>')} {self._add_xml_value(f'value_{index}_{number}', value, schema)} ws"
            )
            written.append(argument if key in required else f"({argument})?")
        return " ".join([json.dumps(f"<function={name}>"), "ws", *written, json.dumps("</function>")])

    def _add_xml_value(self, rule: str, value: Any, schema: JsonObject) -> str:
        end = "</parameter>"
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "string" and isinstance(value.get("enum"), list):
            choices = " | ".join(json.dumps(str(each)) for each in value["enum"])
            return f"ws ({choices}) ws {json.dumps(end)}"
        if kind == "string" or not isinstance(value, dict):
            return self._add_text_up_to(rule, end)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return f"ws {self._add_json(rule, shared | value)} ws {json.dumps(end)}"

    def _add_json(self, rule: str, schema: JsonObject) -> str:
        """Add a rule for JSON of this schema. Returns its name."""
        self._rules[rule] = f"%json {json.dumps(add_whitespace_bound(schema))}"
        return rule

    def _add_text_up_to(self, rule: str, end: str) -> str:
        """Add a rule for text up to the first `end`, inclusive. Returns its name."""
        if end in self._special:
            self._rules[rule] = f"/{_ANY_TEXT}/ {end}"
        else:
            self._rules[f"{rule}[lazy]"] = f"/{_ANY_TEXT}{end.replace('/', chr(92) + '/')}/"
        return rule

    def _format_tag(self, text: str) -> str:
        """Return the pattern of a tag: a special token by name (text does not match it), or text."""
        return text if text in self._special else json.dumps(text)
