"""Aggregation of the metrics of many episodes."""

from collections import defaultdict
from typing import Any

from skyrl_gym import error
from skyrl_gym.envs.registration import env_class_of, spec
from skyrl_gym.finite_numbers import to_finite_scalar


def default_aggregate_metrics(metrics: list[dict[str, object]]) -> dict[str, float]:
    """Average every numeric key over the episodes that report a finite number for it; other values are dropped."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for episode in metrics:
        for key, value in episode.items():
            if (number := to_finite_scalar(value)) is not None:
                values[key].append(number)
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


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
