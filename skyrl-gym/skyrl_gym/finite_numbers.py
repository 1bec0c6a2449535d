"""Check of numbers that users' code returns, such as rewards."""

import math
import reprlib
from collections import defaultdict
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


def to_finite_scalar(value: object) -> float | None:
    """Convert as `to_finite`, and booleans (0 or 1) and scalars of numpy or torch too."""
    try:
        scalar = value.item() if hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue]
    except (RuntimeError, TypeError, ValueError):  # more than one element
        return None
    return float(scalar) if isinstance(scalar, bool) else to_finite(scalar)


def describe(value: object) -> str:
    """Return a short text of a value that is no finite number, for an error."""
    if isinstance(value, int) and not isinstance(value, bool):  # Python refuses to write integers of 4,300 digits
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


def default_aggregate_metrics(metrics: list[dict[str, object]]) -> dict[str, float]:
    """Average every numeric key over the episodes that report a finite number for it; other values are dropped."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for episode in metrics:
        for key, value in episode.items():
            if (number := to_finite_scalar(value)) is not None:
                values[key].append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}
