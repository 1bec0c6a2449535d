"""Aggregation of the metrics of many episodes."""

from typing import Any

from skyrl_gym import error
from skyrl_gym.envs.registration import env_class_of, spec
from skyrl_gym.finite_numbers import default_aggregate_metrics as default_aggregate_metrics


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
