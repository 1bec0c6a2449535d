"""Gymnasium's spaces in words and JSON: what an action may be, reading one, writing an observation.

JSON of a value: Discrete a whole number; Box, MultiDiscrete, MultiBinary nested lists (a bare number for shape ());
Text a string; Tuple a list; Dict an object. Actions of other spaces cannot be read; observations of them are written by
Gymnasium's `to_jsonable`.
"""

import functools
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


@functools.singledispatch
def describe(space: spaces.Space) -> str:
    """Return the values of a space, in words."""
    return f"a value of {space}"


@describe.register
def _(space: spaces.Discrete) -> str:
    return f"a whole number from {space.start} to {space.start + space.n - 1}"


@describe.register
def _(space: spaces.Box) -> str:
    kind = "whole number" if np.issubdtype(space.dtype, np.integer) else "number"
    low, high = np.unique(space.low), np.unique(space.high)
    same = len(low) == len(high) == 1
    if space.shape == ():
        return f"a {kind} {_interval(low[0], high[0])}"
    text = f"a {_shape(space.shape)} {kind}s"
    if same:
        return f"{text}, each {_interval(low[0], high[0])}"
    if space.low.size > MAX_LISTED_BOUNDS:
        return f"{text}, within bounds that differ, all {_interval(space.low.min(), space.high.max())}"
    bounds = [_interval(a, b) for a, b in zip(space.low.flat, space.high.flat, strict=True)]
    return f"{text}: " + "; ".join(f"({i}) {bound}" for i, bound in enumerate(bounds, 1))


@describe.register
def _(space: spaces.MultiDiscrete) -> str:
    first, last = space.start, space.start + space.nvec - 1
    text = f"a {_shape(space.shape)} whole numbers"
    if len(np.unique(first)) == len(np.unique(last)) == 1:
        return f"{text}, each {_interval(first.flat[0], last.flat[0])}"
    bounds = [_interval(a, b) for a, b in zip(first.flat, last.flat, strict=True)]
    return f"{text}: " + "; ".join(f"({i}) {bound}" for i, bound in enumerate(bounds, 1))


@describe.register
def _(space: spaces.MultiBinary) -> str:
    return f"a {_shape(space.shape)} numbers, each 0 or 1"


@describe.register
def _(space: spaces.Text) -> str:
    characters = "".join(sorted(space.character_set))
    if len(characters) > MAX_LISTED_CHARACTERS:
        characters = characters[:MAX_LISTED_CHARACTERS] + f" ... ({len(characters)} in all)"
    return f"a string of {space.min_length} to {space.max_length} of the characters {characters}"


@describe.register
def _(space: spaces.Tuple) -> str:
    parts = "; ".join(f"({i}) {describe(part)}" for i, part in enumerate(space.spaces, 1))
    return f"a list of {len(space.spaces)} parts: {parts}"


@describe.register
def _(space: spaces.Dict) -> str:
    return "an object with " + "; ".join(f'"{key}": {describe(part)}' for key, part in space.spaces.items())


def _shape(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"list of {shape[0]}"
    return f"nested list of shape {' x '.join(map(str, shape))} of"


def _interval(low: Any, high: Any) -> str:
    if np.isinf(low) and np.isinf(high):
        return "of any size"
    if np.isinf(high):
        return f"of at least {low:g}"
    return f"of at most {high:g}" if np.isinf(low) else f"from {low:.10g} to {high:.10g}"


# From JSON


@functools.singledispatch
def read(space: spaces.Space, value: object) -> object:
    """Return the element of a space that a JSON value stands for. Raises IllegalAction."""
    raise NotImplementedError(f"actions of the space {space}")


def is_readable(space: spaces.Space) -> bool:
    """Return whether `read` knows the space and its parts."""
    parts = space.spaces if isinstance(space, spaces.Tuple) else ()
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else parts
    return read.dispatch(type(space)) is not read.dispatch(object) and all(map(is_readable, parts))


@read.register
def _(space: spaces.Discrete, value: object) -> object:
    if not _is_whole(value) or not space.start <= value < space.start + space.n:
        raise IllegalAction(f"{_short(value)} is not {describe(space)}")
    return space.dtype.type(int(value))  # pyright: ignore[reportOptionalMemberAccess]


@read.register
def _(space: spaces.Box, value: object) -> object:
    whole = np.issubdtype(space.dtype, np.integer)
    numbers = _array(space, value, whole)
    _check_bounds(numbers, space.low, space.high)
    if not whole:  # without bounds of its own, the space still ends where its precision does
        largest = np.finfo(space.dtype).max  # pyright: ignore[reportCallIssue, reportArgumentType]
        _check_bounds(numbers, np.full(space.shape, -largest), np.full(space.shape, largest))
    array = numbers.astype(space.dtype)
    if space.contains(array):
        return array
    # rounded to the space's own precision, a number may step over a bound that it kept
    return np.clip(array, space.low, space.high).astype(space.dtype)


@read.register
def _(space: spaces.MultiDiscrete, value: object) -> object:
    numbers = _array(space, value, whole=True)
    _check_bounds(numbers, space.start, space.start + space.nvec - 1)
    return numbers.astype(space.dtype)


@read.register
def _(space: spaces.MultiBinary, value: object) -> object:
    numbers = _array(space, value, whole=True)
    _check_bounds(numbers, np.zeros(space.shape), np.ones(space.shape))
    return numbers.astype(space.dtype)


@read.register
def _(space: spaces.Text, value: object) -> object:
    if not isinstance(value, str):
        raise IllegalAction(f"{_short(value)} is not a string")
    if not space.contains(value):
        raise IllegalAction(f"{_short(value)} is not {describe(space)}")
    return value


@read.register
def _(space: spaces.Tuple, value: object) -> object:
    parts = _list(value)
    if len(parts) != len(space.spaces):
        raise IllegalAction(f"a list of {len(space.spaces)} parts is needed, not of {len(parts)}")
    return tuple(_part(f"part {i}", s, part) for i, (s, part) in enumerate(zip(space.spaces, parts, strict=True), 1))


@read.register
def _(space: spaces.Dict, value: object) -> object:
    if not isinstance(value, Mapping) or set(value) != set(space.spaces):
        raise IllegalAction(f"{_short(value)} is not an object with exactly the keys {', '.join(space.spaces)}")
    return {key: _part(f'"{key}"', part, value[key]) for key, part in space.spaces.items()}


def _part(name: str, space: spaces.Space, value: object) -> object:
    try:
        return read(space, value)
    except IllegalAction as fault:
        raise IllegalAction(f"{name}: {fault}") from None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> TypeGuard[float]:
    return _is_number(value) and value == int(value) and abs(value) < 2**63


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise IllegalAction(f"{_short(value)} is not a list")
    return value


def _array(space: spaces.Space, value: object, whole: bool) -> np.ndarray:
    """Numbers in the space's shape. A bare number may stand for a list of one."""
    shape: tuple[int, ...] = space.shape  # pyright: ignore[reportAssignmentType]
    if shape == (1,) and not isinstance(value, list):
        value = [value]
    flat: list[object] = []
    _flatten(value, shape, flat)
    for number in flat:
        if not (_is_whole(number) if whole else _is_number(number)):
            raise IllegalAction(f"{_short(number)} is not a {'whole' if whole else 'finite'} number")
    return np.array(flat, dtype=np.int64 if whole else np.float64).reshape(shape)


def _flatten(value: object, shape: tuple[int, ...], into: list[object]) -> None:
    if not shape:
        into.append(value)
        return
    if not isinstance(value, list) or len(value) != shape[0]:
        raise IllegalAction(f"{_short(value)} is not a {_shape(shape)} numbers")
    for part in value:
        _flatten(part, shape[1:], into)


def _check_bounds(numbers: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    outside = np.argwhere((numbers < low) | (numbers > high))
    if len(outside):
        place = tuple(outside[0])
        which = f"number {', '.join(str(i + 1) for i in place)}, " if place else ""
        bounds = _interval(np.asarray(low)[place], np.asarray(high)[place])
        raise IllegalAction(f"{which}{_short(numbers[place].item())}, must be {bounds}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# To JSON


@functools.singledispatch
def to_json(space: spaces.Space, element: object) -> object:
    """Return the JSON value of an element of a space."""
    [value] = space.to_jsonable([element])
    return value


@to_json.register
def _(space: spaces.Discrete, element: int) -> object:
    return int(element)


@to_json.register(spaces.Box)
@to_json.register(spaces.MultiDiscrete)
@to_json.register(spaces.MultiBinary)
def _(space: spaces.Space, element: np.ndarray) -> object:
    return np.asarray(element).tolist()


@to_json.register
def _(space: spaces.Text, element: object) -> object:
    return str(element)


@to_json.register
def _(space: spaces.Tuple, element: tuple[object, ...]) -> object:
    return [to_json(part, value) for part, value in zip(space.spaces, element, strict=True)]


@to_json.register
def _(space: spaces.Dict, element: Mapping[str, object]) -> object:
    return {key: to_json(part, element[key]) for key, part in space.spaces.items()}
