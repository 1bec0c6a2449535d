"""Check of numbers that users' code returns, such as rewards."""

import math
import reprlib
from numbers import Real


def to_finite(value: object) -> float | None:
    """Convert a number; None for anything else, and for what no float holds: nan, infinity, integers above 1e308."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def describe(value: object) -> str:
    """Return a short text of a value that is no finite number, for an error."""
    if isinstance(value, int) and not isinstance(value, bool):  # Python refuses to write integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)
