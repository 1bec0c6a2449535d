"""Chunked conversion of long lists of numbers: one call over a million numbers holds the interpreter lock for 15 to
50 ms, during which no other thread can serve a client.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

CHUNK = 1 << 16
"""Numbers, about a millisecond."""


def to_array(numbers: Sequence[int | float]) -> np.ndarray:
    """Convert to an array [N]."""
    return np.concatenate([np.asarray(chunk) for chunk in _split_parts(numbers)])


def list_of(array: np.ndarray) -> list[Any]:
    """Convert an array [N] to a list."""
    numbers = []
    for chunk in _split_parts(array):
        numbers += chunk.tolist()
    return numbers


def encode_json(value: object) -> bytes:
    """Encode an object. Lists of numbers in dictionaries are divided if they are long."""
    return orjson.dumps(_encode_divided(value))


def _encode_divided(value: object) -> object:
    if isinstance(value, dict):
        return {name: _encode_divided(each) for name, each in value.items()}
    if isinstance(value, list) and len(value) > CHUNK and isinstance(value[0], int | float):
        return orjson.Fragment(b"[" + b",".join(orjson.dumps(chunk)[1:-1] for chunk in _split_parts(value)) + b"]")
    return value


def _split_parts(numbers: Any) -> Iterator[Any]:
    """Yield parts of a list or an array; at least one, for the type of an empty array."""
    for start in range(0, max(len(numbers), 1), CHUNK):
        yield numbers[start : start + CHUNK]
