"""Aggregation of the metrics of many episodes."""

import math
from collections import defaultdict
from numbers import Real
from typing import Any

from skyrl_gym import error
from skyrl_gym.envs.registration import env_class_of, spec


def default_aggregate_metrics(metrics: list[dict[str, object]]) -> dict[str, float]:
    """Average every numeric key over the episodes that report a finite number for it; other values are dropped."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for episode in metrics:
        for key, value in episode.items():
            if (number := to_finite_number(value)) is not None:
                values[key].append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


def to_finite_number(value: object) -> float | None:
    """Convert a number, a boolean (0 or 1), or a scalar of numpy or torch to a float; None for anything else, NaN and
    infinities included."""
    try:
        scalar = value.item() if hasattr(value, "item") else value  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(scalar, Real):
            return None
        number = float(scalar)
    except (OverflowError, RuntimeError, TypeError, ValueError):  # more than one element, or beyond a float
        return None
    return number if math.isfinite(number) else None


def aggregate_for_environment(env_name: str, metrics: list[dict[str, object]]) -> dict[str, Any]:
    """Aggregate by the environment's own `aggregate_metrics`; by the mean if a factory's class is unknown.

    Raises:
        ValueError: no environment of that name is registered.
    """
    try:
        env_spec = spec(env_name)
    except error.Error as unknown:
        raise ValueError(str(unknown)) from unknown
    aggregate = getattr(env_class_of(env_spec), "aggregate_metrics", default_aggregate_metrics)
    return aggregate(metrics)
