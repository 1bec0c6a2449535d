"""Layers of the model that megatron-core shards: its linear layers and experts, with custom norm and attention.

The norm is marked for sequence parallelism, unlike the plain torch norm in megatron-core. The attention supports packed
rows, on any device, and the rotary embedding of the transformers model with any scaling.

Shapes: N tokens, D size of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from skyrl_train.models.attention import packed_attention
from skyrl_train.models.packing import PackedRows
from skyrl_train.models.routing_replay import RoutingPass


@dataclass
class RowsInfo(PackedSeqParams):
    """Lengths, rotary embedding and expert routes of the rows of a micro-batch, passed to every layer."""

    rows: PackedRows | None = None
    cos: torch.Tensor | None = None
    """[1, N, D]."""

    sin: torch.Tensor | None = None
    routing: RoutingPass | None = None
    """Replayed or recorded routes; None: the routers choose."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_options: object):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism a rank sees only its tokens: gradients of marked weights are summed over ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in the dtype of the input."""
        wide = states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(states.dtype)


class PackedAttention(nn.Module):
    """Causal attention over packed rows, over this rank's heads."""

    is_causal = True

    def __init__(self, config: TransformerConfig, layer_number: int, **_options: object):
        super().__init__()
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: RowsInfo,
        **_options: Any,
    ) -> torch.Tensor:
        """Compute attention, [N, heads, D] each -> [N, heads D]."""
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        assert packed_seq_params.cos is not None and packed_seq_params.sin is not None
        q, k = apply_rotary_pos_emb(q, k, packed_seq_params.cos, packed_seq_params.sin)
        answer, _ = packed_attention(self, q, k, v, attention_mask, packed_rows=packed_seq_params.rows)
        return answer[0].flatten(1)


def build_block_spec(config: TransformerConfig, first_layer: int, num_layers: int) -> TransformerBlockSubmodules:
    """Build the specification of the layers of one pipeline stage, including the norm after the last one.

    Args:
        first_layer: number of the stage's first layer in the model.
    """
    frequency = config.moe_layer_freq
    sparse = frequency if isinstance(frequency, list) else [int(config.num_moe_experts is not None)] * config.num_layers
    specs = [_build_layer_spec(config, bool(sparse[layer])) for layer in range(first_layer, first_layer + num_layers)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=_to_any(RMSNorm))


def _build_layer_spec(config: TransformerConfig, is_sparse: bool) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=_to_any(PackedAttention),
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    if is_sparse:
        mlp = get_moe_module_spec(
            use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    else:
        mlp = ModuleSpec(
            module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        )
    layer = TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=_to_any(get_bias_dropout_add),
        pre_mlp_layernorm=RMSNorm,
        mlp=mlp,
        mlp_bda=_to_any(get_bias_dropout_add),
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _to_any(part: Any) -> Any:
    """Widen a type: megatron-core accepts classes and functions where its annotations require specifications."""
    return part
