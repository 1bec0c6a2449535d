"""Pydantic errors as a path in the request and a reason."""

from typing import NamedTuple

from pydantic import ValidationError


class FieldError(NamedTuple):
    """One wrong field."""

    place: str
    """Path, such as `messages.0.content`."""
    message: str
    is_missing: bool


def find_field_error(error: ValidationError, values: object) -> FieldError:
    """Return the most deeply nested error: of a union, it belongs to the member that fits best.

    Args:
        values: the validated input.
    """
    deepest = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    place = _format_path(deepest["loc"], values) or "body"
    return FieldError(place, deepest["msg"], deepest["type"] == "missing")


def _format_path(location: tuple[int | str, ...], values: object) -> str:
    """Format the path of a field, without pydantic's names of union members."""
    names: list[str] = []
    *outer, last = location or ("",)
    for part in outer:
        is_tag = isinstance(values, dict) and part == values.get("type")
        is_key = isinstance(values, dict) and part in values and not is_tag
        if is_key or (isinstance(values, list) and isinstance(part, int) and part < len(values)):
            names.append(str(part))
            values = values[part]  # pyright: ignore
    if isinstance(values, dict) or (isinstance(values, list) and isinstance(last, int)):
        names.append(str(last))
    return ".".join(names)
