"""Model families with a weight map, and model features that the Megatron backend does not support.

Imports neither torch nor megatron-core: a model is rejected before any process starts.
"""

from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """Features of models of a `model_type`."""

    qkv_bias: bool = False
    """Biases of the query, key and value projections."""

    qk_norms: bool = False
    """Norms of queries and keys."""

    is_mixture: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norms=True),
    "qwen3_moe": Family(qk_norms=True, is_mixture=True),
}


def get_family(config: Any) -> Family:
    """Return the family of a transformers config.

    Raises:
        ConfigError: it has no weight map, or an unsupported feature that would be ignored.
    """
    kind = getattr(config, "model_type", None)
    advice = "use trainer.strategy=fsdp2"
    if kind not in FAMILIES:
        raise ConfigError(
            f"trainer.strategy=megatron does not support model_type={kind!r}; it supports {', '.join(FAMILIES)}: "
            f"{advice}"
        )
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise ConfigError(f"trainer.strategy=megatron does not support biases ({name}=true): {advice}")
    if getattr(config, "use_sliding_window", False) or "sliding_attention" in (
        getattr(config, "layer_types", None) or ()
    ):
        raise ConfigError(f"trainer.strategy=megatron does not support sliding-window attention: {advice}")
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ConfigError(f"trainer.strategy=megatron supports hidden_act=silu, not {config.hidden_act}: {advice}")
    return FAMILIES[kind]
