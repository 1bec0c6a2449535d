"""Errors of pydantic as the place in a request and the reason."""

from typing import NamedTuple

from pydantic import ValidationError


class FieldError(NamedTuple):
    """One wrong field."""

    place: str
    """Its path, as in `messages.0.content`."""
    message: str
    is_missing: bool


def field_error(error: ValidationError, values: object) -> FieldError:
    """Return the error that lies deepest: of a union's members that one is meant which fits best.

    Args:
        values: what was validated.
    """
    deepest = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    place = _place(deepest["loc"], values) or "body"
    return FieldError(place, deepest["msg"], deepest["type"] == "missing")


def _place(location: tuple[int | str, ...], values: object) -> str:
    """Return the path of a field, without pydantic's names of a union's members, which the request does not have."""
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
