"""Name of the cache among the arguments and results of transformers' modules: `cache` in newer releases of 5, earlier
`past_key_values`, and `cache_params` of linear attention. Custom code of a model keeps to its release."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def find_cache_argument(forward: Callable[..., Any], otherwise: str = "past_key_values") -> str:
    """Return the name of the cache argument of a module's forward."""
    return "cache" if "cache" in inspect.signature(forward).parameters else otherwise


def get_cache(values: Mapping[str, Any]) -> Any:
    """Return the cache among keywords, or in a model's output."""
    return values["cache"] if "cache" in values else values["past_key_values"]
