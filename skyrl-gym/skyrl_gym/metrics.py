"""How the metrics of many episodes become one set of numbers."""

from collections import defaultdict
from typing import Any

from skyrl_gym import error
from skyrl_gym.envs.registration import load_env_creator, registry


def default_aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """The mean of every numeric key, over the episodes that report it. Booleans are 0 and 1; the rest is dropped."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for episode in metrics:
        for key, value in episode.items():
            if isinstance(value, bool | int | float):
                values[key].append(float(value))
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items()}


def aggregate_for_environment(env_name: str, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Aggregates by the environment's own `aggregate_metrics`, or by the mean if what makes it is a plain function.

    Raises:
        ValueError: no environment of that name is registered.
    """
    env_spec = registry.get(env_name)
    if env_spec is None:
        raise ValueError(f"No registered env with id: {env_name}")
    if env_spec.entry_point is None:
        raise error.Error(f"{env_name} is registered without an entry point")
    creator = load_env_creator(env_spec.entry_point)
    aggregate = getattr(creator, "aggregate_metrics", default_aggregate_metrics)
    return aggregate(metrics)
