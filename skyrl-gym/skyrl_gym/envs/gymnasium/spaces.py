"""Gymnasium's spaces in words and JSON: what an action may be, reading one, writing an observation.

JSON of a value: Discrete a whole number; Box, MultiDiscrete, MultiBinary nested lists (a bare number for shape ());
Text a string; Tuple a list; Dict an object. Actions of other spaces cannot be read; observations of them are written by
Gymnasium's `to_jsonable`.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from gymnasium import spaces

MAX_LISTED_BOUNDS = 32
"""Bounds of an array whose entries differ are listed one by one up to this many."""

MAX_LISTED_CHARACTERS = 70


class IllegalAction(Exception):
    """Text of a model that is not in the space. The message names the rule."""


# In words


def describe(space: spaces.Space) -> str:
    """Return the values of a space, in words."""
    match space:
        case spaces.Discrete():
            return f"a whole number from {space.start} to {space.start + space.n - 1}"
        case spaces.Box():
            kind = "whole number" if np.issubdtype(space.dtype, np.integer) else "number"
            return _describe_array(space, kind, space.low, space.high)
        case spaces.MultiDiscrete():
            return _describe_array(space, "whole number", space.start, space.start + space.nvec - 1)
        case spaces.MultiBinary():
            return f"a {_format_shape(space.shape)} numbers, each 0 or 1"
        case spaces.Text():
            characters = "".join(sorted(space.character_set))
            if len(characters) > MAX_LISTED_CHARACTERS:
                characters = characters[:MAX_LISTED_CHARACTERS] + f" ... ({len(characters)} in all)"
            return f"a string of {space.min_length} to {space.max_length} of the characters {characters}"
        case spaces.Tuple():
            parts = "; ".join(f"({i}) {describe(part)}" for i, part in enumerate(space.spaces, 1))
            return f"a list of {len(space.spaces)} parts: {parts}"
        case spaces.Dict():
            return "an object with " + "; ".join(f'"{key}": {describe(part)}' for key, part in space.spaces.items())
    return f"a value of {space}"


def _describe_array(space: spaces.Space, kind: str, low: np.ndarray, high: np.ndarray) -> str:
    if space.shape == ():
        return f"a {kind} {_format_interval(low.item(), high.item())}"
    text = f"a {_format_shape(space.shape or ())} {kind}s"
    if len(np.unique(low)) == len(np.unique(high)) == 1:
        return f"{text}, each {_format_interval(low.flat[0], high.flat[0])}"
    if low.size > MAX_LISTED_BOUNDS:
        return f"{text}, within bounds that differ, all {_format_interval(low.min(), high.max())}"
    bounds = [_format_interval(a, b) for a, b in zip(low.flat, high.flat, strict=True)]
    return f"{text}: " + "; ".join(f"({i}) {bound}" for i, bound in enumerate(bounds, 1))


def _format_shape(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"list of {shape[0]}"
    return f"nested list of shape {' x '.join(map(str, shape))} of"


def _format_interval(low: Any, high: Any) -> str:
    if np.isinf(low) and np.isinf(high):
        return "of any size"
    if np.isinf(high):
        return f"of at least {low:g}"
    return f"of at most {high:g}" if np.isinf(low) else f"from {low:.10g} to {high:.10g}"


# From JSON


def is_readable(space: spaces.Space) -> bool:
    """Return whether `read` knows the space and its parts."""
    match space:
        case spaces.Tuple():
            return all(map(is_readable, space.spaces))
        case spaces.Dict():
            return all(map(is_readable, space.spaces.values()))
    return isinstance(space, spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Text)


def read(space: spaces.Space, value: object) -> object:
    """Convert a JSON value to an element of a readable space. Raises IllegalAction."""
    match space:
        case spaces.Discrete():
            if not _is_integer(value) or not space.start <= value < space.start + space.n:
                raise IllegalAction(f"{_format_short(value)} is not {describe(space)}")
            return space.dtype.type(int(value))  # pyright: ignore[reportOptionalMemberAccess]
        case spaces.Box():
            return _read_box(space, value)
        case spaces.MultiDiscrete():
            return _bounded(space, value, space.start, space.start + space.nvec - 1).astype(space.dtype)
        case spaces.MultiBinary():
            return _bounded(space, value, np.zeros(space.shape), np.ones(space.shape)).astype(space.dtype)
        case spaces.Text():
            if not isinstance(value, str):
                raise IllegalAction(f"{_format_short(value)} is not a string")
            if not space.contains(value):
                raise IllegalAction(f"{_format_short(value)} is not {describe(space)}")
            return value
        case spaces.Tuple():
            parts = _list(value)
            if len(parts) != len(space.spaces):
                raise IllegalAction(f"a list of {len(space.spaces)} parts is needed, not of {len(parts)}")
            pairs = zip(space.spaces, parts, strict=True)
            return tuple(_parse_part(f"part {i}", inner, part) for i, (inner, part) in enumerate(pairs, 1))
        case spaces.Dict():
            if not isinstance(value, Mapping) or set(value) != set(space.spaces):
                raise IllegalAction(
                    f"{_format_short(value)} is not an object with exactly the keys {', '.join(space.spaces)}"
                )
            return {key: _parse_part(f'"{key}"', part, value[key]) for key, part in space.spaces.items()}
    raise NotImplementedError(f"actions of the space {space}")


def _read_box(space: spaces.Box, value: object) -> np.ndarray:
    whole = np.issubdtype(space.dtype, np.integer)
    numbers = _bounded(space, value, space.low, space.high, whole)
    if not whole:  # without bounds of its own, the space still ends where its precision does
        largest = np.finfo(space.dtype).max  # pyright: ignore[reportCallIssue, reportArgumentType]
        _check_bounds(numbers, np.full(space.shape, -largest), np.full(space.shape, largest))
    array = numbers.astype(space.dtype)
    # rounded to the space's own precision, a number may step over a bound that it kept
    return array if space.contains(array) else np.clip(array, space.low, space.high).astype(space.dtype)


def _parse_part(name: str, space: spaces.Space, value: object) -> object:
    try:
        return read(space, value)
    except IllegalAction as fault:
        raise IllegalAction(f"{name}: {fault}") from None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: object) -> TypeGuard[float]:
    return _is_number(value) and value == int(value) and abs(value) < 2**63


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise IllegalAction(f"{_format_short(value)} is not a list")
    return value


def _parse_array(space: spaces.Space, value: object, whole: bool) -> np.ndarray:
    """Parse numbers in the space's shape. A bare number is accepted as a list of one."""
    shape: tuple[int, ...] = space.shape  # pyright: ignore[reportAssignmentType]
    if shape == (1,) and not isinstance(value, list):
        value = [value]
    flat: list[object] = []
    _flatten(value, shape, flat)
    for number in flat:
        if not (_is_integer(number) if whole else _is_number(number)):
            raise IllegalAction(f"{_format_short(number)} is not a {'whole' if whole else 'finite'} number")
    return np.array(flat, dtype=np.int64 if whole else np.float64).reshape(shape)


def _flatten(value: object, shape: tuple[int, ...], into: list[object]) -> None:
    if not shape:
        into.append(value)
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise IllegalAction(f"{_format_short(value)} is not a {_format_shape(shape)} numbers")
    for part in value:
        _flatten(part, shape[1:], into)


def _bounded(space: spaces.Space, value: object, low: np.ndarray, high: np.ndarray, whole: bool = True) -> np.ndarray:
    numbers = _parse_array(space, value, whole)
    _check_bounds(numbers, low, high)
    return numbers


def _check_bounds(numbers: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    outside = np.argwhere((numbers < low) | (numbers > high))
    if len(outside):
        place = tuple(outside[0])
        which = f"number {', '.join(str(i + 1) for i in place)}, " if place else ""
        bounds = _format_interval(np.asarray(low)[place], np.asarray(high)[place])
        raise IllegalAction(f"{which}{_format_short(numbers[place].item())}, must be {bounds}")


def _format_short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# To JSON


def to_json(space: spaces.Space, element: Any) -> object:
    """Return the JSON value of an element of a space."""
    match space:
        case spaces.Discrete():
            return int(element)
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return np.asarray(element).tolist()
        case spaces.Text():
            return str(element)
        case spaces.Tuple():
            return [to_json(part, value) for part, value in zip(space.spaces, element, strict=True)]
        case spaces.Dict():
            return {key: to_json(part, element[key]) for key, part in space.spaces.items()}
    [value] = space.to_jsonable([element])
    return value
