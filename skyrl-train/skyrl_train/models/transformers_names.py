"""Names of transformers that differ between its releases, and in models with custom code of an older one."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def find_cache_argument(forward: Callable[..., Any], otherwise: str = "past_key_values") -> str:
    """Return the name of the cache argument of a module's forward: `cache` from 5.24 on, earlier `past_key_values`, and
    `cache_params` of linear attention."""
    return "cache" if "cache" in inspect.signature(forward).parameters else otherwise


def get_cache(values: Mapping[str, Any]) -> Any:
    """Return the cache among keywords, or in a model's output."""
    return values["cache"] if "cache" in values else values["past_key_values"]


def enable_gradient_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    """Recompute the layers of a model in the backward; 5.24 renames transformers' method."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": use_reentrant})
