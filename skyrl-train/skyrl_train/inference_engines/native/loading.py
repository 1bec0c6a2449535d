"""Loading of a causal language model, its tokenizer and its limits from a local folder or the hub."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from skyrl_train.errors import ConfigError
from skyrl_train.inference_engines.native.architecture import check_architecture
from skyrl_train.inference_engines.native.attention import ATTENTION_NAME
from skyrl_train.inference_engines.native.experts import use_native_experts
from skyrl_train.inference_engines.native.fused_layers import fuse_layers
from skyrl_train.inference_engines.native.packed_linear import pack_linears
from skyrl_train.models.linear_attention import LINEAR_ATTENTION
from skyrl_train.models.weight_files import apply_dtype_plan

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    model_path: str,
    *,
    device: torch.device,
    dtype: str,
    model_config_kwargs: Mapping[str, object] | None,
    trust_remote_code: bool,
    dummy_weights: bool = False,
    shared_weights: Mapping[str, torch.Tensor] | None = None,
) -> PreTrainedModel:
    """Load a model in eval mode on its device, with native attention (on a CPU also native experts and packed layers).

    Args:
        dummy_weights: random weights, without reading files
        shared_weights: existing parameters and buffers to use, instead of reading files

    Raises:
        ConfigError: an unknown dtype, or a model that the engine cannot run (`architecture.py`).
        ValueError: shared weights of another model.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"the native engine's dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, **(model_config_kwargs or {}))
    check_architecture(config, model_path)
    options: dict[str, Any] = {
        "dtype": _DTYPES[dtype],
        "attn_implementation": ATTENTION_NAME,
        "trust_remote_code": trust_remote_code,
    }
    if shared_weights is not None or dummy_weights:
        with device if shared_weights is None else torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
        apply_dtype_plan(model, _DTYPES[dtype])
        with contextlib.suppress(OSError):  # no such file: the values from `from_config` apply
            model.generation_config = GenerationConfig.from_pretrained(model_path)
        if shared_weights is not None:
            _share_weights(model, shared_weights, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_path, config=config, **options)
    if device.type == "cpu":
        use_native_experts(model)
    model.to(device)  # pyright: ignore[reportArgumentType]
    model.eval().requires_grad_(False)
    fuse_layers(model)
    pack_linears(model)
    return model


def _share_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set existing parameters and buffers in a model on the meta device, sharing memory if device and dtype match."""
    for name, empty in [*model.named_parameters(), *model.named_buffers()]:
        given = weights.get(name)
        if given is None or given.shape != empty.shape:
            found = "is not there" if given is None else f"has shape {tuple(given.shape)}, not {tuple(empty.shape)}"
            raise ValueError(f"shared_weights must be those of {model.config.name_or_path}: {name} {found}")
        owner, _, own_name = name.rpartition(".")
        tensor = given.detach().to(device)
        if isinstance(empty, torch.nn.Parameter):  # (buffers, such as rotary frequencies, keep their dtype)
            tensor = torch.nn.Parameter(tensor.to(empty.dtype), requires_grad=False)
        setattr(model.get_submodule(owner), own_name, tensor)
    model.tie_weights()


def load_tokenizer(model_path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def find_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Collect the end-of-sequence ids of generation config, config and tokenizer."""
    generation = getattr(model.generation_config, "eos_token_id", None)
    found: list[Any] = []
    for named in (generation, model.config.get_text_config().eos_token_id, tokenizer.eos_token_id):
        found += named if isinstance(named, list) else [named] if named is not None else []
    return tuple(dict.fromkeys(found))


def get_context_length(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Return `max_model_len`, or the model's limit if None.

    Raises:
        ConfigError: the setting is below 2, above the model's limit, or needed because the model names no limit.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if max_model_len is None:
        if limit is None:
            raise ConfigError(f"max_model_len must be set: {model.config.model_type} models name no longest context")
        return int(limit)
    if max_model_len < 2 or (limit is not None and max_model_len > limit):
        raise ConfigError(
            f"max_model_len must be from 2 to the model's max_position_embeddings={limit}; got {max_model_len}. "
            "A longer context needs rope_scaling (or max_position_embeddings) in model_config_kwargs"
        )
    return max_model_len


def cache_bytes_of_token(model: PreTrainedModel) -> int:
    """Compute the size of keys and values of one token in all layers, in bytes."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = 2 * heads * width
    if getattr(
        config, "kv_lora_rank", None
    ):  # latent attention: transformers caches the latent that keys are computed from
        numbers = config.kv_lora_rank + config.qk_rope_head_dim
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    num_layers = sum(kind != LINEAR_ATTENTION for kind in kinds)
    return num_layers * numbers * model.dtype.itemsize
