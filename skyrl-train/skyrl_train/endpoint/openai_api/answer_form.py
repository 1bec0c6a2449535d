"""Form of a chat answer (`response_format`, `tool_choice`, `parallel_tool_calls`) as a constraint for engines.

The constraint is about the whole answer, as the model writes it: a thought stands before what the form is about, and
tool calls are in the format that the chat template asks the model for (`tool_calls.py`), with arguments of the tools'
schemas. Grammars are in llguidance's Lark.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from skyrl_train.endpoint.errors import ApiError, refused
from skyrl_train.endpoint.openai_api.prompts import EndpointTemplate
from skyrl_train.endpoint.openai_api.schema import ChatRequest
from skyrl_train.endpoint.openai_api.thoughts import THOUGHT_CLOSE, THOUGHT_OPEN, opens_thought
from skyrl_train.endpoint.openai_api.tool_calls import ToolSyntax
from skyrl_train.inference_engines.constraints import Constraint, with_bounded_space
from skyrl_train.types import JsonObject

MAX_CALLS = 32
"""Tool calls in one constrained answer."""

_ANY_TEXT = r"(.|\n)*"
_CALL_OPEN, _CALL_CLOSE, _FUNCTION_OPEN = "<tool_call>", "</tool_call>", "<function="

ThoughtMode = Literal["none", "open", "possible"]
"""A thought before the answer: `open` in the prompt, `possible` where the model may begin one."""


@dataclass(frozen=True)
class AnswerForm:
    """Form that a request asks for."""

    schema: JsonObject | None
    """JSON schema of the text; None: any text."""
    calls: Literal["none", "auto", "required"]
    functions: tuple[JsonObject, ...]
    """Functions that may be called."""
    parallel: bool
    """Several calls in one answer."""

    @property
    def param(self) -> str | None:
        """Field of the request that makes a constraint necessary; None: none does."""
        if self.schema is not None:
            return "response_format"
        if self.calls == "required":
            return "tool_choice"
        return "parallel_tool_calls" if self.calls == "auto" and not self.parallel else None


def answer_form(request: ChatRequest) -> AnswerForm:
    """Read the form of the answer from a request. Raises ApiError."""
    functions = [tool.function for tool in request.tools or []]
    calls, names = _tool_choice(request.tool_choice)
    known = [str(function.get("name")) for function in functions]
    if (calls == "required" or names) and not functions:
        raise refused("tool_choice is only allowed when tools are given", "tool_choice")
    if unknown := sorted(set(names or ()) - set(known)):
        raise refused(f"tool_choice names {unknown[0]!r}; the tools are {', '.join(known)}", "tool_choice")
    if names is not None:
        functions = [function for function in functions if function.get("name") in names]
    form = AnswerForm(
        schema=_schema(request.response_format),
        calls=calls if functions else "none",
        functions=tuple(functions),
        parallel=request.parallel_tool_calls is not False,
    )
    if form.param is not None and request.continue_final_message:
        raise refused(
            f"{form.param} is about whole answers; it does not go with continue_final_message=true", form.param
        )
    return form


def thought_mode(template: EndpointTemplate, prompt: str) -> ThoughtMode:
    """Return whether an answer behind this prompt may begin with a thought."""
    if opens_thought(prompt):
        return "open"
    is_closed = prompt.rstrip().endswith(THOUGHT_CLOSE)  # as templates do where thinking is turned off
    return "possible" if THOUGHT_CLOSE in (template.source or "") and not is_closed else "none"


def constraint_of(
    form: AnswerForm, thought: ThoughtMode, template: EndpointTemplate, syntax: ToolSyntax
) -> Constraint | None:
    """Return the constraint of answers in this form; None if they need none. Raises ApiError if it is too large."""
    if form.param is None:
        return None
    try:
        if form.schema is not None and form.calls == "none" and thought == "none":
            return Constraint.of({"json_schema": form.schema})
        for function in form.functions:
            Constraint.of({"json_schema": _parameters(function)})
        return Constraint.of({"lark": _Grammar(form, thought, template, syntax).text()})
    except ValueError as error:
        raise refused(f"{form.param}: {error}", form.param) from error


# From JSON to forms

_OBJECT: JsonObject = {"type": "object"}


def _schema(given: object) -> JsonObject | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return _OBJECT
    if kind != "json_schema" or not isinstance(given, Mapping):
        raise _wrong("response_format", given, "{'type': 'text' | 'json_object' | 'json_schema', …}")
    described = given.get("json_schema")
    if not isinstance(described, Mapping) or not isinstance(described.get("name"), str):
        raise _wrong("response_format.json_schema", described, "an object with name and schema")
    schema = described.get("schema", _OBJECT)
    if not isinstance(schema, dict):
        raise _wrong("response_format.json_schema.schema", schema, "a JSON schema, an object")
    return schema


def _tool_choice(given: object) -> tuple[Literal["none", "auto", "required"], list[str] | None]:
    """Return whether calls are made, and the names of the functions that may be called; None: all."""
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
            names = [_name_of(tool) for tool in tools]
            if None not in names:
                return mode, [name for name in names if name is not None]
    raise _wrong("tool_choice", given, "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}")


def _name_of(tool: object) -> str | None:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
    return None


def _wrong(where: str, given: object, rule: str) -> ApiError:
    return refused(f"{where} must be {rule}; got {str(given)[:100]!r}", where.split(".")[0], "invalid_value")


def _parameters(function: JsonObject) -> JsonObject:
    schema: Any = function.get("parameters")
    return schema if isinstance(schema, dict) and schema else _OBJECT


# From forms to grammars


class _Grammar:
    """Rules of one grammar. Rule `start` is the answer."""

    def __init__(self, form: AnswerForm, thought: ThoughtMode, template: EndpointTemplate, syntax: ToolSyntax):
        self._form = form
        self._thought = thought
        self._special = set(template.tokenizer.all_special_tokens)
        self._writes_xml = syntax == "hermes" and _FUNCTION_OPEN in (template.source or "")
        self._syntax = syntax
        self._rules: dict[str, str] = {"ws": r"/[ \n]{0,4}/"}

    def text(self) -> str:
        body = self._body()
        if self._thought != "none":
            end = self._up_to("thought", THOUGHT_CLOSE)
            opened = f"{end} ws"
            body = (
                f"{opened} ({body})" if self._thought == "open" else f"({self._tag(THOUGHT_OPEN)} {opened})? ({body})"
            )
        rules = {"start": body} | self._rules
        return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _body(self) -> str:
        form = self._form
        if form.calls == "none":
            return f"{self._json('answer', form.schema or _OBJECT)} ws"
        if form.schema is not None:
            alternatives = (
                [self._calls()] if form.calls == "required" else [self._json("answer", form.schema), self._calls()]
            )
            return f"({' | '.join(alternatives)}) ws"
        return f"{self._calls()} ws" if form.calls == "required" else self._text_or_call()

    def _calls(self) -> str:
        call = f"({' | '.join(self._call(index) for index in range(len(self._form.functions)))})"
        self._rules["call"] = call
        if not self._form.parallel:
            return "call"
        between = '";" ws' if self._syntax == "llama3_json" else "ws"
        return f"call ({between} call){{0,{MAX_CALLS - 1}}}"

    def _text_or_call(self) -> str:
        """Return text without a call, or with one call at its end."""
        if self._syntax == "llama3_json":  # a call is a whole answer
            self._rules["PLAIN"] = rf"/([^{{ \n]{_ANY_TEXT})?/"
            return f"PLAIN | {self._one_call()} ws"
        if _CALL_OPEN in self._special:
            self._rules["PLAIN"] = f"/{_ANY_TEXT}/"
            return f"PLAIN ({self._one_call()} ws)?"
        self._rules["PLAIN"] = f"/{_ANY_TEXT}/ & ~/{_ANY_TEXT}{_CALL_OPEN}{_ANY_TEXT}/"
        self._rules["opened[lazy]"] = f"/{_ANY_TEXT}{_CALL_OPEN}/"
        return f"PLAIN | opened ({self._one_call(is_open=True)}) ws"

    def _one_call(self, is_open: bool = False) -> str:
        return " | ".join(self._call(index, is_open) for index in range(len(self._form.functions)))

    def _call(self, index: int, is_open: bool = False) -> str:
        """Return one call of function `index`; without its first tag if that is written already."""
        function = self._form.functions[index]
        name, schema = str(function.get("name")), _parameters(function)
        if self._syntax == "llama3_json":
            return self._json_call(index, name, schema, "parameters")
        inner = (
            self._xml_call(index, name, schema)
            if self._writes_xml
            else self._json_call(index, name, schema, "arguments")
        )
        opening = "" if is_open else f"{self._tag(_CALL_OPEN)} "
        return f"{opening}ws {inner} ws {self._tag(_CALL_CLOSE)}"

    def _json_call(self, index: int, name: str, schema: JsonObject, key: str) -> str:
        arguments = self._json(f"arguments_{index}", schema)
        parts = ["{", json.dumps("name"), ":", json.dumps(name), ",", json.dumps(key), ":"]
        return f"{' ws '.join(json.dumps(part) for part in parts)} ws {arguments} ws {json.dumps('}')}"

    def _xml_call(self, index: int, name: str, schema: JsonObject) -> str:
        """Qwen3-Coder's form, in which each argument is text between tags of its own."""
        required: Any = schema.get("required") or []
        properties: Any = schema.get("properties") or {}
        if not isinstance(required, list) or not isinstance(properties, dict):
            raise ValueError(f"parameters of the function {name!r} must have an object `properties`, a list `required`")
        written = []
        for number, (key, value) in enumerate(properties.items()):
            argument = (
                f"{json.dumps(f'<parameter={key}>')} {self._xml_value(f'value_{index}_{number}', value, schema)} ws"
            )
            written.append(argument if key in required else f"({argument})?")
        return " ".join([json.dumps(f"<function={name}>"), "ws", *written, json.dumps("</function>")])

    def _xml_value(self, rule: str, value: Any, schema: JsonObject) -> str:
        end = "</parameter>"
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "string" and isinstance(value.get("enum"), list):
            choices = " | ".join(json.dumps(str(each)) for each in value["enum"])
            return f"ws ({choices}) ws {json.dumps(end)}"
        if kind == "string" or not isinstance(value, dict):
            return self._up_to(rule, end)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        return f"ws {self._json(rule, shared | value)} ws {json.dumps(end)}"

    def _json(self, rule: str, schema: JsonObject) -> str:
        """Add a rule for JSON of this schema. Returns its name."""
        self._rules[rule] = f"%json {json.dumps(with_bounded_space(schema))}"
        return rule

    def _up_to(self, rule: str, end: str) -> str:
        """Add a rule for text up to the first `end`, which belongs to it. Returns its name."""
        if end in self._special:
            self._rules[rule] = f"/{_ANY_TEXT}/ {end}"
        else:
            self._rules[f"{rule}[lazy]"] = f"/{_ANY_TEXT}{end.replace('/', chr(92) + '/')}/"
        return rule

    def _tag(self, text: str) -> str:
        """Return a tag: a special token by its name, which text does not match, or text."""
        return text if text in self._special else json.dumps(text)
