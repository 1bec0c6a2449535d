"""Signatures of tools: a JSON schema from type hints and docstring, and conversion of a model's arguments.

Two functions mirror each other: `schema_of` describes the JSON that a hint admits, `read` converts such JSON to a
value.
"""

import dataclasses
import enum
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

from skyrl_gym.call_arguments import SOLE_ARGUMENT, Schema, parse_text

__all__ = [
    "SOLE_ARGUMENT",
    "ArgumentError",
    "Docstring",
    "Hint",
    "Schema",
    "Signature",
    "describe",
    "parse_docstring",
    "parse_text",
    "read",
    "schema_of",
]

Hint = Any
"""A type hint; Python has no type for all of them."""

_NO_DEFAULT = inspect.Parameter.empty
_SEQUENCES = {list, tuple, set, frozenset, Sequence}
_MAPPINGS = {dict, Mapping}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}
_SHOWN_CHARACTERS = 80


class ArgumentError(ValueError):
    """Invalid arguments of a tool call. The text is for the model: the argument, its value and the rule."""


class Signature:
    """Parameters of a tool: the parameters of `func` without the first `skip` (`self`), which the model does not
    provide.

    Raises:
        TypeError: `func` has `*args`, `**kwargs` or positional-only parameters: a model calls by name.
    """

    def __init__(self, func: Callable[..., object], skip: int = 1):
        self._func = func
        self._parameters = list(inspect.signature(func).parameters.values())[skip:]
        for parameter in self._parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(
                    f"tool {func.__qualname__}: {parameter} cannot be called by name; "
                    f"a tool's parameters must each have a name"
                )

    @property
    def _hints(self) -> dict[str, Hint]:
        """Type hints, evaluated lazily: at decoration the names in them may not be defined yet."""
        try:
            return get_type_hints(self._func, include_extras=True)
        except NameError as failure:
            raise TypeError(f"tool {self._func.__qualname__}: a type hint cannot be read: {failure}") from failure

    def schema(self) -> Schema:
        """Build the JSON schema of the arguments. Raises TypeError for a hint without one."""
        hints, texts = self._hints, parse_docstring(self._func.__doc__).arguments
        properties: Schema = {}
        for parameter in self._parameters:
            try:
                described = schema_of(hints.get(parameter.name, Any))
            except TypeError as failure:
                raise TypeError(f"tool {self._func.__qualname__}, parameter {parameter.name}: {failure}") from None
            if parameter.name in texts:
                described.setdefault("description", texts[parameter.name])
            if parameter.default is not _NO_DEFAULT and _is_json(parameter.default):
                described["default"] = parameter.default
            properties[parameter.name] = described
        required = [parameter.name for parameter in self._parameters if parameter.default is _NO_DEFAULT]
        return {"type": "object", "properties": properties, "required": required}

    def bind(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Convert a model's arguments to keyword arguments of the right types.

        A number or boolean given as text is parsed; null for a parameter with a default means the default.

        Raises:
            ArgumentError: one is missing, unknown or of the wrong type.
        """
        known = {parameter.name: parameter for parameter in self._parameters}
        if set(arguments) == {SOLE_ARGUMENT}:
            arguments = self._named(arguments[SOLE_ARGUMENT])
        unknown = [name for name in arguments if name not in known]
        if unknown:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ArgumentError(f"there is no argument {_format_value(unknown[0])}; {takes}")
        hints, bound = self._hints, {}
        for name, parameter in known.items():
            has_default = parameter.default is not _NO_DEFAULT
            hint = hints.get(name, Any)
            if name not in arguments or (has_default and arguments[name] is None and not _is_nullable(hint)):
                if not has_default:
                    raise ArgumentError(f"argument {name!r} ({describe(hint)}) is missing")
                continue
            bound[name] = read(hint, arguments[name], name)
        return bound

    def _named(self, value: object) -> dict[str, object]:
        if not self._parameters and value in ("", None):
            return {}
        return {self._parameters[0].name if self._parameters else SOLE_ARGUMENT: value}


def schema_of(hint: Hint, _inside: tuple[Hint, ...] = ()) -> Schema:
    """Build the JSON schema of a type hint. Raises TypeError for a hint that JSON cannot express."""
    if hint in _inside:
        raise TypeError(f"{hint.__name__} contains itself")
    hint, text = _unwrap_hint(hint)
    schema = _build_schema(hint, _inside)
    return schema | {"description": text} if text else schema


def _build_schema(hint: Hint, inside: tuple[Hint, ...]) -> Schema:
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any or hint is object:
        return {}
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return _build_enum_schema(arguments)
    if _is_enum(hint):
        return _build_enum_schema([member.value for member in hint])
    if origin in (Union, types.UnionType):
        return _build_union_schema([schema_of(arm, inside) for arm in arguments])
    if origin in _SEQUENCES:
        return _build_array_schema(origin, arguments, inside)
    if origin in _MAPPINGS:
        if arguments and arguments[0] is not str:
            raise TypeError(f"{hint} has keys that are not str, and JSON has none other")
        values = schema_of(arguments[1], inside) if arguments else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if fields := _get_record_fields(hint):
        return {
            "type": "object",
            "properties": {name: schema_of(field, (*inside, hint)) for name, (field, _) in fields.items()},
            "required": [name for name, (_, required) in fields.items() if required],
            "additionalProperties": False,
        }
    raise TypeError(
        f"{hint!r} cannot be described to a model; use str, int, float, bool, Literal, Enum, list, dict, "
        f"TypedDict, a dataclass, or unions of these"
    )


def _build_enum_schema(values: Sequence[object]) -> Schema:
    kinds = {_JSON_TYPES.get(type(value)) for value in values}
    if None in kinds:
        raise TypeError(f"{list(values)} has values that JSON does not have")
    return {**({"type": kinds.pop()} if len(kinds) == 1 else {}), "enum": list(values)}


def _build_union_schema(arms: list[Schema]) -> Schema:
    """Build a union: plain types share one `type` list, which every chat template can show; anything richer is
    `anyOf`.
    """
    if any(not arm for arm in arms):
        return {}
    if all(set(arm) == {"type"} for arm in arms):
        return {"type": [arm["type"] for arm in arms]}
    return {"anyOf": arms}


def _build_array_schema(origin: object, arguments: tuple[object, ...], inside: tuple[object, ...]) -> Schema:
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        items = [schema_of(item, inside) for item in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    items = schema_of(arguments[0], inside) if arguments else {}
    unique = {"uniqueItems": True} if origin in (set, frozenset) else {}
    return {"type": "array", **({"items": items} if items else {}), **unique}


def read(hint: Hint, value: object, where: str) -> Any:
    """Convert a JSON value to the type of a hint. `where` names it in errors. Raises ArgumentError."""
    try:
        return _read(hint, value, where)
    except ArgumentError as failure:
        parsed = parse_text(value)
        if parsed is None:
            raise
        try:
            return _read(hint, parsed, where)
        except ArgumentError:
            raise failure from None


def _read(hint: Hint, value: Any, where: str) -> Any:
    hint, _ = _unwrap_hint(hint)
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if hint is Any or hint is object:
        return value
    wrong = ArgumentError(f"argument {where!r} must be {describe(hint)}; got {_format_value(value)}")
    if hint in _JSON_TYPES:
        return _read_plain(hint, value, wrong)
    if origin is Literal:
        return _find_member(dict.fromkeys(arguments), value, wrong)
    if _is_enum(hint):
        return hint(_find_member({member.value: member for member in hint}, value, wrong))
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, where, wrong)
    if origin in _SEQUENCES:
        if not isinstance(value, list):
            raise wrong
        return _read_items(origin, arguments, value, where, wrong)
    if not isinstance(value, Mapping):
        raise wrong
    if origin in _MAPPINGS:
        return {key: read(arguments[1], item, f"{where}.{key}") for key, item in value.items()} if arguments else value
    return _read_record(hint, value, where)


def _read_plain(hint: type, value: Any, wrong: ArgumentError) -> object:
    """Convert a plain value. Not `isinstance`: True is no number. 5.0 is a whole number, 5 is a number."""
    if type(value) is hint:
        if hint is float and not math.isfinite(value):
            raise wrong
        return value
    if hint is int and type(value) is float and value.is_integer():
        return int(value)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise wrong from None
    raise wrong


def _find_member(members: Mapping[Hint, object], value: object, wrong: ArgumentError) -> object:
    for member in members:
        if type(member) is type(value) and member == value:
            return member
    raise wrong


def _read_union(arms: tuple[object, ...], value: object, where: str, wrong: ArgumentError) -> object:
    for reader in (lambda arm: _read(arm, value, where), lambda arm: read(arm, value, where)):
        for arm in arms:
            try:
                return reader(arm)
            except ArgumentError:
                continue
    raise wrong


def _read_items(
    origin: Hint, arguments: tuple[Hint, ...], value: list[object], where: str, wrong: ArgumentError
) -> Any:
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            raise wrong
        hints = list(arguments)
    else:
        hints = [arguments[0] if arguments else Any] * len(value)
    items = [read(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(zip(hints, value, strict=True))]
    if origin in (list, Sequence):
        return items
    try:
        return origin(items)
    except TypeError:  # a set of lists
        raise wrong from None


def _read_record(hint: Hint, value: Mapping[str, object], where: str) -> object:
    fields = _get_record_fields(hint)
    for name in value:
        if name not in fields:
            raise ArgumentError(f"argument {where!r} has no field {_format_value(name)}; it has {', '.join(fields)}")
    for name, (field, required) in fields.items():
        if required and name not in value:
            raise ArgumentError(f"argument {where!r} must have the field {name!r} ({describe(field)})")
    made = {name: read(fields[name][0], item, f"{where}.{name}") for name, item in value.items()}
    if not dataclasses.is_dataclass(hint):
        return made
    try:
        return hint(**made)  # pyright: ignore[reportCallIssue]
    except (ValueError, TypeError) as failure:  # what its __post_init__ refuses
        raise ArgumentError(f"argument {where!r}: {failure}") from failure


def _get_record_fields(hint: Hint) -> dict[str, tuple[Hint, bool]]:
    """Return name -> (hint, required) of a TypedDict or dataclass; empty for anything else."""
    if typing.is_typeddict(hint):
        return {
            name: (field, name in hint.__required_keys__)
            for name, field in get_type_hints(hint, include_extras=True).items()
        }
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return {
            field.name: (hints[field.name], field.default is field.default_factory is dataclasses.MISSING)
            for field in dataclasses.fields(hint)
            if field.init
        }
    return {}


def _unwrap_hint(hint: Hint) -> tuple[Hint, str | None]:
    """Unwrap a hint (`Annotated`, `Required`, `NotRequired`, `NewType`). Returns: the hint and the outermost text."""
    text: str | None = None
    while True:
        origin = get_origin(hint)
        if origin is Annotated:
            text = text or next((note for note in hint.__metadata__ if isinstance(note, str)), None)
            hint = hint.__origin__
        elif origin in (Required, NotRequired):
            hint = get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            return (types.NoneType if hint is None else hint), text


def _is_enum(hint: Hint) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _is_nullable(hint: Hint) -> bool:
    try:
        _read(hint, None, "")
    except ArgumentError:
        return False
    return True


def describe(hint: Hint) -> str:
    """Describe a hint for a model, in JSON's terms rather than Python's."""
    schema = schema_of(hint)
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(describe(arm) for arm in get_args(_unwrap_hint(hint)[0]))
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array" and "minItems" in schema:
        return f"array of {schema['minItems']} values"
    return kind


def _format_value(value: object) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


class Docstring(typing.NamedTuple):
    """Descriptions in a docstring: of the function and of each argument."""

    description: str
    arguments: dict[str, str]


_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*")
_ARGUMENT = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def parse_docstring(docstring: str | None) -> Docstring:
    """Parse a docstring in Google's style (https://google.github.io/styleguide/pyguide.html#383-functions-and-methods)."""
    section, description, arguments = None, [], {}
    names: list[str] = []
    indent = 0
    for line in inspect.cleandoc(docstring or "").splitlines():
        if found := _SECTION.fullmatch(line):
            section, names = found[1], []
        elif section is None or (line and not line[0].isspace()):
            section = None
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            entry = _ARGUMENT.fullmatch(line.strip()) if not names or depth <= indent else None
            if entry:
                names, indent = [name.strip(" *") for name in entry[1].split(",")], depth
            for name in names:
                arguments[name] = f"{arguments.get(name, '')} {entry[2] if entry else line.strip()}".strip()
    return Docstring("\n".join(description).strip(), arguments)
