"""Loading of transformers models for training, in one process."""

import logging
import re
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_flash_attn_2_available

from skyrl_train.errors import ConfigError
from skyrl_train.models.cpu_linear import enable_onednn_linear
from skyrl_train.models.quantized import describe_quantization
from skyrl_train.models.transformers_names import enable_gradient_checkpointing

logger = logging.getLogger(__name__)


def select_attention_implementation(flash_attn: bool, device: torch.device) -> str:
    """Select the fastest exact attention to padded rows on `device`, or eager attention."""
    if not flash_attn:
        return "eager"
    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


def load_causal_lm(path: str, *, device: torch.device, **loading: Any) -> PreTrainedModel:
    """Load a model in float32 and training mode (dropout disabled, as in rollouts), from a folder or a hub name. It
    stays on the CPU; sharding moves its parts.

    Args:
        device: device it will compute on.
        loading: as for `load_backbone`.
    """
    return _load(AutoModelForCausalLM, path, device=device, **loading)


def load_backbone(path: str, *, device: torch.device, **loading: Any) -> PreTrainedModel:
    """Load a model without the output layer.

    Args:
        flash_attn: False for the model's eager attention.
        config_overrides: fields of the model's config to replace, such as `rope_theta`. gradient_checkpointing,
            use_reentrant: recompute activations in the backward; with torch's older implementation.
        with_weights: False for parameters and buffers with only shapes (meta device): their values come from files
            (`weight_files`) or another rank.
    """
    return _load(AutoModel, path, device=device, **loading)


def _load(
    kind: Any,
    path: str,
    *,
    device: torch.device,
    flash_attn: bool = True,
    config_overrides: dict[str, object] | None = None,
    gradient_checkpointing: bool = False,
    use_reentrant: bool = False,
    with_weights: bool = True,
) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path, trust_remote_code=True)
    for name, value in (config_overrides or {}).items():
        if not hasattr(config, name):
            raise ConfigError(f"model_config_kwargs.{name}: the config of {path} has no such field")
        setattr(config, name, value)
    if quantization := describe_quantization(config):
        raise ConfigError(f"{path} cannot be trained: {quantization}")
    _disable_dropout(config)
    options = dict(
        dtype=torch.float32,
        attn_implementation=_select_supported_implementation(
            config, select_attention_implementation(flash_attn, device)
        ),
        trust_remote_code=True,
    )
    try:
        if with_weights:
            model = kind.from_pretrained(path, config=config, **options)
        else:
            with torch.device("meta"):
                model = kind.from_config(config, **options)
            if model.can_generate():
                model.generation_config = _load_generation_config(path)  # included in exports
    except ValueError as error:
        if flash_attn and "attn_implementation" in str(error):
            raise ConfigError(
                f"{path} does not support another attention implementation: set trainer.flash_attn=false"
            ) from error
        raise
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    if gradient_checkpointing:
        enable_gradient_checkpointing(model, use_reentrant=use_reentrant)
        model.config.use_cache = False
        if use_reentrant:  # a frozen embedding would otherwise cut off the backward through later layers
            model.enable_input_require_grads()
    if device.type == "cpu":
        enable_onednn_linear(model)
    return model


def _select_supported_implementation(config: Any, implementation: str) -> str:
    """Return `implementation`, or `eager` if it would ignore a part of the model's attention to padded rows: score caps
    (Gemma 2) or sinks (gpt-oss). Packed rows use a separate attention function."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_known = getattr(model_class, "_supports_attention_backend", False)
    # A model with custom attention offers no choice; `check_scoring` compares it.
    without_sdpa = is_known and not model_class._supports_sdpa
    if implementation != "eager" and (
        without_sdpa or getattr(config.get_text_config(), "attn_logit_softcapping", None)
    ):
        logger.info("%s: attention over padded rows uses the eager implementation", config.model_type)
        return "eager"
    return implementation


def _load_generation_config(path: str) -> GenerationConfig:
    """Return the generation settings that `from_pretrained` gives a model."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def _disable_dropout(config: Any) -> None:
    """Disable dropout in a config: attention layers read it from there, not from a module."""
    for name, value in vars(config.get_text_config()).items():
        if isinstance(value, float) and re.search(r"dropout|_pdrop$", name):
            setattr(config.get_text_config(), name, 0.0)
