"""Models from transformers, ready for training. Knows no process but its own."""

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
from skyrl_train.models.cpu_linear import use_onednn_linear
from skyrl_train.models.quantized import quantization_of

logger = logging.getLogger(__name__)


def attention_implementation(flash_attn: bool, device: torch.device) -> str:
    """The fastest exact attention to padded rows there is on `device`, or the eager one."""
    if not flash_attn:
        return "eager"
    return "flash_attention_2" if device.type == "cuda" and is_flash_attn_2_available() else "sdpa"


def load_causal_lm(path: str, *, device: torch.device, **loading: Any) -> PreTrainedModel:
    """A model in float32 in training mode (dropout off: rollouts had none), from a folder or a hub name. It is on the
    CPU: sharding moves what it divides.

    Args:
        device: what it will compute on.
        loading: as for `load_backbone`.
    """
    return _load(AutoModelForCausalLM, path, device=device, **loading)


def load_backbone(path: str, *, device: torch.device, **loading: Any) -> PreTrainedModel:
    """The same without the output layer.

    Args:
        flash_attn: False for the model's attention written out in single operations.
        config_overrides: fields of the model's config to replace, such as `rope_theta`.
        gradient_checkpointing, use_reentrant: compute activations again in the backward; by torch's older form of it.
        with_weights: False for parameters and buffers that have shapes only (meta device): their values come from files
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
    if quantization := quantization_of(config):
        raise ConfigError(f"{path} cannot be trained: {quantization}")
    _without_dropout(config)
    options = dict(
        dtype=torch.float32,
        attn_implementation=_implementation_for(config, attention_implementation(flash_attn, device)),
        trust_remote_code=True,
    )
    try:
        if with_weights:
            model = kind.from_pretrained(path, config=config, **options)
        else:
            with torch.device("meta"):
                model = kind.from_config(config, **options)
            if model.can_generate():
                model.generation_config = _generation_config(path)  # which exports have
    except ValueError as error:
        if flash_attn and "attn_implementation" in str(error):
            raise ConfigError(f"{path} knows no attention but its own: set trainer.flash_attn=false") from error
        raise
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.train()
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.config.use_cache = False
        if use_reentrant:  # a frozen embedding would otherwise hide the layers after it from the backward
            model.enable_input_require_grads()
    if device.type == "cpu":
        use_onednn_linear(model)
    return model


def _implementation_for(config: Any, implementation: str) -> str:
    """Return `implementation`, or `eager` where it would leave out a part of the model's attention to padded rows: caps
    on scores (Gemma 2), sinks (gpt-oss). Packed rows have an attention of their own."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_known = getattr(model_class, "_supports_attention_backend", False)
    # A model with attention of its own has no other to choose; `check_scoring` compares it.
    without_sdpa = is_known and not model_class._supports_sdpa
    if implementation != "eager" and (
        without_sdpa or getattr(config.get_text_config(), "attn_logit_softcapping", None)
    ):
        logger.info("%s: attention to padded rows is written out (eager)", config.model_type)
        return "eager"
    return implementation


def _generation_config(path: str) -> GenerationConfig:
    """Return the settings that `from_pretrained` gives a model."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_pretrained(path, config_file_name="config.json", _from_model_config=True)


def _without_dropout(config: Any) -> None:
    """Attention layers take their dropout from the config, not from a module that could be found."""
    for name, value in vars(config.get_text_config()).items():
        if isinstance(value, float) and re.search(r"dropout|_pdrop$", name):
            setattr(config.get_text_config(), name, 0.0)
