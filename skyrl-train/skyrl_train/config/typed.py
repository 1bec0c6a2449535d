"""Conversion of plain values to typed dataclasses: the only module that checks external values against annotations.

Knows dataclasses and annotations, no particular setting. `name` is always the setting's full dotted name, for errors.
"""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from skyrl_train.config.other_releases import (
    find_moved_names,
    get_choice_refusal_reason,
    get_refusal_reason,
    is_refused,
)
from skyrl_train.errors import ConfigError

T = TypeVar("T")

REST = {"rest": True}
"""Metadata of a dict field that collects all undeclared sections, and is flattened in `to_dict`."""


@dataclasses.dataclass(frozen=True)
class Choices:
    """Annotation of a text setting that must be one of some names: `Annotated[str, Choices(names)]`.

    Like `Literal`, for names that a registry knows.
    """

    names: Callable[[], Iterable[str]]


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
SECTIONS = "sections"
"""Metadata key of a dict field: a function that returns name -> dataclass of the field's sections. Each section appears
in the dataclass under its name, next to the declared settings."""

_NUMBER_TYPES = (int, float)


@functools.cache  # evaluates the annotations of a whole dataclass, for each section of each settings object
def get_annotations(config_type: type) -> dict[str, Any]:
    """Return the annotations of a dataclass by field, inherited ones included."""
    return get_type_hints(config_type, include_extras=True)


def make_reference(text: str) -> Any:
    """Declare another setting's value as default, such as `${trainer.seed}`. Typed Any because it replaces that
    value.
    """
    return text


def build(config_type: type[T], values: Mapping[str, object], name: str = "", root: type | None = None) -> T:
    """Build a `config_type` from `values`; missing ones have their defaults.

    Raises ConfigError on an unknown name (with the nearest valid one below `root`) and on a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a section of settings; got {values!r}")
    root = root or config_type
    hints = get_annotations(config_type)
    declared = {field.name: field for field in dataclasses.fields(config_type) if not _is_merged(field)}  # type: ignore[arg-type]
    holder, sections = get_registered_sections(config_type)
    rest = next((field.name for field in dataclasses.fields(config_type) if _is_rest(field)), None)  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        full_name = join(name, str(key))
        if key in declared:
            arguments[key] = convert_value(
                hints[key], _fill_defaults(_get_default(declared[key]), value), full_name, root
            )
        elif holder and key in sections:
            arguments.setdefault(holder, {})[key] = convert_value(sections[key], value, full_name, root)
        elif rest and isinstance(value, Mapping) and not is_refused(full_name):
            arguments.setdefault(rest, {})[key] = dict(value)
        else:
            raise _build_unknown_setting_error(full_name, value, root)
    try:
        return config_type(**arguments)
    except ValueError as error:  # a rule of the dataclass itself
        raise error if isinstance(error, ConfigError) else ConfigError(f"{name}: {error}") from error


def _fill_defaults(default: Any, value: object) -> object:
    """Fill missing values of a section from `default`: a section's defaults may differ from its type's."""
    if not isinstance(value, Mapping) or not dataclasses.is_dataclass(default):
        return value
    own = {field.name for field in dataclasses.fields(default) if not _is_merged(field)}
    merged: dict[str, object] = {name: getattr(default, name) for name in own}
    for key, item in value.items():
        merged[str(key)] = _fill_defaults(merged.get(str(key)), item)
    return merged


def _get_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a setting or section, or None."""
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def get_registered_sections(config_type: type) -> tuple[str | None, dict[str, type]]:
    """Return the field of a dataclass that holds registered sections (or None), and name -> dataclass."""
    for field in dataclasses.fields(config_type):
        if SECTIONS in field.metadata:
            return field.name, field.metadata[SECTIONS]()
    return None, {}


def convert_value(annotation: object, value: object, name: str, root: type) -> Any:
    """Return `value` as `annotation` requires, or raise ConfigError. An int is a float too; a bool is no int; text is
    no number.
    """
    if dataclasses.is_dataclass(annotation):
        return value if isinstance(value, annotation) else build(annotation, value, name, root)  # type: ignore[arg-type]
    if annotation in (Any, object) or (isinstance(value, str) and _REFERENCE.search(value)):
        return value  # a reference gets its type when `resolve_references` knows the value
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _convert_choice(annotation, value, name, root)
    if origin in (Union, types.UnionType):
        return _convert_union_member(annotation, value, name, root)
    if origin is Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is list and isinstance(value, (list, tuple)):
        return [convert_value(arguments[0], item, f"{name}[{index}]", root) for index, item in enumerate(value)]
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(arguments):
        return tuple(
            convert_value(member, item, f"{name}[{index}]", root)
            for index, (member, item) in enumerate(zip(arguments, value, strict=True))
        )
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return {str(key): convert_value(arguments[1], item, join(name, str(key)), root) for key, item in value.items()}
    if annotation is float and isinstance(value, _NUMBER_TYPES) and not isinstance(value, bool):
        return float(value)
    if annotation in (int, str, bool) and type(value) is annotation:
        return value
    if annotation is type(None) and value is None:
        return None
    raise _build_wrong_value_error(annotation, value, name)


def _convert_choice(annotation: Any, value: Any, name: str, root: type) -> object:
    """Return `value` as the annotated type if it is one of the names of its `Choices`."""
    base, *marks = get_args(annotation)
    for mark in marks:
        if isinstance(mark, Choices) and value not in mark.names():
            raise _build_wrong_value_error(annotation, value, name)
    return convert_value(base, value, name, root)


def _convert_union_member(annotation: object, value: object, name: str, root: type) -> object:
    """Return `value` as the first union member that accepts it. With a single candidate, its more specific error is
    raised.
    """
    candidates = [member for member in get_args(annotation) if member is not type(None)]
    if value is None and len(candidates) < len(get_args(annotation)):
        return None
    if len(candidates) == 1:
        return convert_value(candidates[0], value, name, root)
    for candidate in candidates:
        try:
            return convert_value(candidate, value, name, root)
        except ConfigError:
            continue
    raise _build_wrong_value_error(annotation, value, name)


def resolve_references(config: object) -> None:
    """Replace every `${other.setting}` in the text settings below `config` by that setting's value, in place."""
    root = type(config)

    def resolve_value(name: str, path: tuple[str, ...]) -> object:
        if name in path:
            raise ConfigError(f"circular references between settings: {' -> '.join((*path, name))}")
        value = config
        for part in name.split("."):
            if not dataclasses.is_dataclass(value) or not hasattr(value, part):
                raise ConfigError(f"{path[-1]} refers to ${{{name}}}, which is not a setting")
            value = getattr(value, part)
        if not isinstance(value, str):
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return resolve_value(whole[1], (*path, name))
        return _REFERENCE.sub(lambda match: str(resolve_value(match[1], (*path, name))), value)

    for name, section, field in iter_settings(config):
        before = getattr(section, field.name)
        if isinstance(before, str) and _REFERENCE.search(before):
            annotation = get_annotations(type(section))[field.name]
            setattr(section, field.name, convert_value(annotation, resolve_value(name, ()), name, root))


def iter_settings(config: Any, name: str = "") -> Iterator[tuple[str, object, dataclasses.Field[object]]]:
    """Yield (full name, section that holds it, field) of all settings below the dataclass instance `config`."""
    for field in dataclasses.fields(config):
        value, full_name = getattr(config, field.name), join(name, field.name)
        if SECTIONS in field.metadata:
            for key, section in value.items():
                yield from iter_settings(section, join(name, key))
        elif dataclasses.is_dataclass(value):
            yield from iter_settings(value, full_name)
        else:
            yield full_name, config, field


def to_dict(config: object) -> Any:
    """Convert a dataclass instance to plain dicts, lists and scalars, as `build` accepts."""
    if not dataclasses.is_dataclass(config):
        if isinstance(config, dict):
            return {key: to_dict(value) for key, value in config.items()}
        return [to_dict(value) for value in config] if isinstance(config, list) else config
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = to_dict(getattr(config, field.name))
        values |= value if _is_merged(field) else {field.name: value}
    return values


def list_setting_names(config_type: type, name: str = "") -> Iterator[str]:
    """Return the full names of all settings and sections of a dataclass."""
    hints = get_annotations(config_type)
    for key, section in get_registered_sections(config_type)[1].items():
        yield join(name, key)
        yield from list_setting_names(section, join(name, key))
    for field in dataclasses.fields(config_type):
        if _is_merged(field):
            continue
        full_name = join(name, field.name)
        yield full_name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from list_setting_names(hints[field.name], full_name)


def is_among(name: str, names: Iterable[str]) -> bool:
    """Return whether a setting is one of `names`, or in a section listed there with a trailing dot."""
    return any(name == known or (known.endswith(".") and name.startswith(known)) for known in names)


def join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_rest(field: dataclasses.Field[object]) -> bool:
    return bool(field.metadata.get("rest"))


def _is_merged(field: dataclasses.Field[object]) -> bool:
    """Return whether the entries of a dict field appear next to the declared settings."""
    return _is_rest(field) or SECTIONS in field.metadata


def _build_unknown_setting_error(name: str, value: object, root: type) -> ConfigError:
    reason = get_refusal_reason(name, value)
    if reason:
        return ConfigError(reason)
    moved = find_moved_names(name)
    if moved and isinstance(value, Mapping) and value:  # a section of other releases that contains the unknown name
        name = join(name, str(next(iter(value))))
    nearest = find_nearest_name(name, [*list_setting_names(root), *moved])
    return ConfigError(f"unknown setting {name}" + (f"; did you mean {nearest}?" if nearest else ""))


def find_nearest_name(name: str, valid_names: list[str]) -> str | None:
    """Return the most similar valid name, or None. The last part counts most, so that misplaced settings are found."""

    def get_last_part(full_name: str) -> str:
        return full_name.rsplit(".", 1)[-1]

    def compute_similarity(candidate: str) -> tuple[float, float]:
        last = SequenceMatcher(None, get_last_part(name), get_last_part(candidate)).ratio()
        return last, SequenceMatcher(None, name, candidate).ratio()

    best = max(valid_names, key=lambda candidate: sum(compute_similarity(candidate)), default=None)
    return best if best is not None and compute_similarity(best)[0] > 0.6 else None


def _build_wrong_value_error(annotation: object, value: object, name: str) -> ConfigError:
    reason = get_choice_refusal_reason(name, value)
    if reason is not None:
        return ConfigError(reason)
    hint = ""
    if isinstance(value, str) and annotation in (int, float, bool) and re.fullmatch(r"[-+\d.eE]+|true|false", value):
        hint = " (a string; write it without quotes)"
    return ConfigError(f"{name} must be {describe_expectation(annotation)}; got {value!r}{hint}")


def describe_expectation(annotation: object) -> str:
    """Describe the values that an annotation accepts, for errors and the reference page."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_expectation(member) for member in arguments)
    if origin is Annotated:
        choices = [mark for mark in arguments[1:] if isinstance(mark, Choices)]
        return "one of " + ", ".join(choices[0].names()) if choices else describe_expectation(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is list:
        return f"a list of {describe_expectation(arguments[0])}"
    words = {
        int: "an int",
        float: "a number",
        str: "text",
        bool: "true or false",
        type(None): "null",
        Any: "anything",
        object: "anything",
    }
    return "any names and values" if origin is dict else words.get(annotation, str(annotation))
