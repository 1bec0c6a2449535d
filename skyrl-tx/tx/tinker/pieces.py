"""Piecewise conversion of long lists of numbers: one call over a million numbers holds the interpreter lock for 15 to
50 ms, during which no other thread can serve a client.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

PIECE = 1 << 16
"""Numbers, about a millisecond."""


def to_array(numbers: Sequence[int | float]) -> np.ndarray:
    """[N] as `np.asarray` makes it."""
    return np.concatenate([np.asarray(piece) for piece in _split_parts(numbers)])


def list_of(array: np.ndarray) -> list[Any]:
    """Return an array [N] as `tolist` does."""
    numbers = []
    for piece in _split_parts(array):
        numbers += piece.tolist()
    return numbers


def encode_json(value: object) -> bytes:
    """Encode an object. Lists of numbers in dictionaries are divided if they are long."""
    return orjson.dumps(_encode_divided(value))


def _encode_divided(value: object) -> object:
    if isinstance(value, dict):
        return {name: _encode_divided(each) for name, each in value.items()}
    if isinstance(value, list) and len(value) > PIECE and isinstance(value[0], int | float):
        return orjson.Fragment(b"[" + b",".join(orjson.dumps(piece)[1:-1] for piece in _split_parts(value)) + b"]")
    return value


def _split_parts(numbers: Any) -> Iterator[Any]:
    """Yield parts of a list or an array; at least one, for the type of an empty array."""
    for start in range(0, max(len(numbers), 1), PIECE):
        yield numbers[start : start + PIECE]
