"""Conversion of a transformers config to megatron-core's layer configuration."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from skyrl_train.errors import ConfigError
from skyrl_train.training_backends.megatron.families import Family, get_family
from skyrl_train.training_backends.megatron.layout import ParallelSizes, compute_padded_vocabulary
from skyrl_train.training_backends.megatron.weight_map import MapSizes


def build_transformer_config(
    model: Any,
    layout: ParallelSizes,
    given: Mapping[str, Any],
    *,
    dispatcher: str,
    device: torch.device,
    bf16: bool,
    recompute: bool,
) -> TransformerConfig:
    """Build megatron-core's configuration for the layers of a transformers model.

    Args:
        model: its config.
        given: `megatron_config.transformer_config_kwargs`.
        dispatcher: method of sending tokens to the ranks of their experts.
        recompute: recompute activations in the backward, according to the `recompute_*` entries of `given`.
    """
    arguments = _get_layer_fields(model) | _get_layout_fields(layout) | _get_numeric_fields(device, bf16)
    arguments["moe_token_dispatcher_type"] = dispatcher
    own = {name: value for name, value in given.items() if recompute or not name.startswith("recompute_")}
    config = TransformerConfig(**(arguments | own))
    # A field that the constructor derives would override a user's value: each is compared again.
    changed = [name for name, value in own.items() if getattr(config, name) != value]
    if changed:
        raise ConfigError(f"megatron_config.transformer_config_kwargs: megatron-core overrides {', '.join(changed)}")
    return config


def _get_layer_fields(model: Any) -> dict[str, Any]:
    """Return the fields determined by the model."""
    family = get_family(model)
    layers: dict[str, Any] = dict(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=get_head_dim(model),
        ffn_hidden_size=model.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=family.qk_norms,
        add_bias_linear=False,
        add_qkv_bias=family.qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        # Log-probs of the same weights must not differ between forwards.
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return layers | (_get_mixture_fields(model) if family.is_mixture else {})


def _get_layout_fields(layout: ParallelSizes) -> dict[str, Any]:
    """Return the fields determined by the layout."""
    return dict(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.tensor > 1,
        # Rows are packed: micro-batches differ in length, and stages announce it.
        variable_seq_lengths=True,
    )


def _get_numeric_fields(device: torch.device, bf16: bool) -> dict[str, Any]:
    """Return dtypes and kernels."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    return dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        # Weights come from the transformers model.
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # Kernels of optional extensions.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def _get_mixture_fields(model: Any) -> dict[str, Any]:
    """Return the fields of layers with experts."""
    return dict(
        num_moe_experts=model.num_experts,
        moe_ffn_hidden_size=model.moe_intermediate_size,
        moe_router_topk=model.num_experts_per_tok,
        moe_router_score_function="softmax",
        # Softmax over the chosen experts equals softmax over all, renormalized to 1.
        moe_router_pre_softmax=not model.norm_topk_prob,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        moe_layer_freq=[int(layer in find_sparse_layers(model)) for layer in range(model.num_hidden_layers)],
    )


def find_sparse_layers(model: Any) -> frozenset[int]:
    """Return the numbers of the layers with experts."""
    if not get_family(model).is_mixture:
        return frozenset()
    every, dense = model.decoder_sparse_step, set(model.mlp_only_layers)
    return frozenset(
        layer for layer in range(model.num_hidden_layers) if layer not in dense and (layer + 1) % every == 0
    )


def get_head_dim(model: Any) -> int:
    """Return the size of an attention head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def map_sizes(model: Any, layout: ParallelSizes, value_head: str | None) -> MapSizes:
    """Return the sizes of the weight map of a transformers config."""
    family: Family = get_family(model)
    return MapSizes(
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=get_head_dim(model),
        num_words=model.vocab_size,
        padded_words=compute_padded_vocabulary(model.vocab_size, layout.tensor),
        expert_ranks=layout.expert,
        num_experts=model.num_experts if family.is_mixture else 0,
        sparse_layers=find_sparse_layers(model),
        tied_head=model.tie_word_embeddings and value_head is None,
        value_head=value_head,
        qkv_bias=family.qkv_bias,
        qk_norms=family.qk_norms,
    )
