"""Fused decoders with half the kernels of transformers' modules, for inference on a CPU. For the Llama family, with
layers

    h += W_o attention(rotate(W_q n), rotate(W_k n), W_v n)    with n = norm(h); Qwen3 norms each head before it rotates
    h += W_down (act(W_gate n) * W_up n)                       with n = norm(h)

One product computes all layers with the same input, rotation and norms process queries and keys together, sums are in
place, and the second line processes a long prompt in parts that fit the processor's cache. Results differ from
transformers' modules by rounding; a row's bits do not depend on other rows, since all kernels work row by row.

Adapters (`lora.py`) are hooks of the linear layers, applied to each layer's part of a product. A pass without an
`AttentionStep` (the trial at loading) uses transformers' own forward.

Dimensions: B rows, T tokens a row, H query heads, K key-value heads, D head width.
"""

import functools
import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from skyrl_train.inference_engines.native.attention import AttentionStep, compute_native_attention
from skyrl_train.inference_engines.native.cache import SlotCache
from skyrl_train.inference_engines.native.packed_linear import PackedLinears
from skyrl_train.models.transformers_names import get_cache

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of transformers with decoder layers as above."""
_PART = 256
"""Approximate number of tokens that a feed-forward layer processes together, so that its activations fit the
second-level cache.
"""


def fuse_layers(model: nn.Module) -> None:
    """Replace the forward of supported decoders on a CPU by `FusedDecoder`. Weights and their names stay;
    `pack_linears` packs them.
    """
    for module in model.modules():
        if _is_known(module) and next(module.parameters()).device.type == "cpu":
            module.forward = FusedDecoder(module)


def _is_known(decoder: nn.Module) -> bool:
    """Return whether a decoder has exactly the family's modules. A custom model may replace any of them, and may give
    the same results until it is trained.
    """
    modeling = sys.modules[type(decoder).__module__]
    family = {f"transformers.models.{kind}.modeling_{kind}" for kind in _FAMILY}
    name = type(decoder).__name__.removesuffix("Model")
    if modeling.__name__ not in family or not hasattr(modeling, f"{name}DecoderLayer"):
        return False
    own = (f"{name}{part}" for part in ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding"))
    known = {getattr(modeling, part) for part in own} | {nn.Embedding, nn.Linear, nn.ModuleList}
    activations = {getattr(module, "act_fn", None) for module in decoder.modules()}
    return all(
        (type(part) in known or part in activations)
        and not (part._forward_hooks or part._forward_pre_hooks)
        and "forward" not in vars(part)
        for part in decoder.modules()
    )


class FusedDecoder:
    """Replacement of the `forward` of a decoder: embeddings, layers and the last norm."""

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self._layers = [FusedDecoderLayer(layer) for layer in decoder.layers]

    @property
    def packed_linears(self) -> tuple[PackedLinears, ...]:
        return tuple(packed for layer in self._layers for packed in layer.packed_linears)

    def __call__(self, *, native_step: AttentionStep | None = None, **keywords: Any) -> BaseModelOutputWithPast:
        """Compute the states of tokens `input_ids` [B, T], or of `inputs_embeds` [B, T, hidden], at `position_ids`;
        transformers' calling convention."""
        decoder = self._decoder
        if native_step is None:  # not a pass of the engine: another cache and attention
            return type(decoder).forward(decoder, **keywords)
        cache: SlotCache = get_cache(keywords)
        hidden_states = keywords.get("inputs_embeds")
        if hidden_states is None:
            hidden_states = decoder.embed_tokens(keywords["input_ids"])
        cos, sin = decoder.rotary_emb(hidden_states, keywords["position_ids"])
        first, second = sin.chunk(2, dim=-1)
        rotation = cos[:, :, None], torch.cat([-first, second], dim=-1)[:, :, None]
        for layer in self._layers:
            hidden_states = layer(hidden_states, rotation, cache, native_step)
        states: Any = _apply_rms_norm(hidden_states, decoder.norm)
        return BaseModelOutputWithPast(last_hidden_state=states)


class FusedDecoderLayer:
    """Fused decoder layer."""

    def __init__(self, layer: Any):
        self._layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = PackedLinears(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = PackedLinears(mlp.gate_proj, mlp.up_proj)
        self._head_dim = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_key_heads = attention.k_proj.out_features // self._head_dim
        # All of Mistral's layers have the config's window, some of Qwen's, none of Llama's.
        holder = attention.config if attention.config.model_type == "mistral" else attention
        self._window: int | None = getattr(holder, "sliding_window", None)

    @property
    def packed_linears(self) -> tuple[PackedLinears, ...]:
        return self._qkv, self._gate_up

    def __call__(
        self,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        step: AttentionStep,
    ) -> torch.Tensor:
        """Apply the layer, [B, T, hidden] -> [B, T, hidden].

        Args:
            rotation: cos and sin of the rotary embedding [B, T, 1, D], sin negative in the first half
        """
        hidden_states = self._attend(hidden_states, rotation, cache, step)
        self._add_feed_forward(hidden_states.flatten(0, 1))
        return hidden_states

    def _attend(
        self,
        hidden_states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        cache: SlotCache,
        step: AttentionStep,
    ) -> torch.Tensor:
        """Return the states with attention added."""
        layer, attention = self._layer, self._layer.self_attn
        projected = _compute_projections(self._qkv, _apply_rms_norm(hidden_states, layer.input_layernorm))
        # Views from here to the norm: queries, keys and values of a token are adjacent.
        heads = projected.unflatten(-1, (-1, self._head_dim))
        rotated, values = heads.split([self._num_heads + self._num_key_heads, self._num_key_heads], dim=2)
        if hasattr(attention, "q_norm"):
            # Two kernels on the original weights: a fused copy would have to follow their updates.
            rotated = _divide_by_rms(rotated, attention.q_norm.variance_epsilon)
            rotated[:, :, : self._num_heads].mul_(attention.q_norm.weight)
            rotated[:, :, self._num_heads :].mul_(attention.k_norm.weight)
        rotated = _rotate(rotated, *rotation).transpose(1, 2)
        queries, new_keys = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        keys, values = cache.update(new_keys, values.transpose(1, 2), attention.layer_idx)
        output, _ = compute_native_attention(
            attention,
            queries,
            keys,
            values,
            None,
            native_step=step,
            scaling=attention.scaling,
            sliding_window=self._window,
        )
        # In place: a product is a new tensor, also after an adapter has added to it.
        return attention.o_proj(output.flatten(2)).add_(hidden_states)

    def _add_feed_forward(self, hidden_states: torch.Tensor) -> None:
        """Add the feed-forward layer to states [N, hidden], in place."""
        mlp = self._layer.mlp
        # Hooks of adapters expect all rows at once.
        has_hooks = any(layer._forward_hooks for layer in (*self._gate_up.layers, mlp.down_proj))
        # Parts of almost equal size: none has too few rows for the common kernel.
        num_parts = 1 if has_hooks else -(-len(hidden_states) // _PART)
        for part in hidden_states.tensor_split(num_parts):
            gate, up = _compute_projections(
                self._gate_up, _apply_rms_norm(part, self._layer.post_attention_layernorm)
            ).chunk(2, dim=-1)
            part.add_(mlp.down_proj(mlp.act_fn(gate).mul_(up)))


def _compute_projections(linears: PackedLinears, x: torch.Tensor) -> torch.Tensor:
    """Compute several layers of one input, with their hooks."""
    output = linears(x)
    if any(layer._forward_hooks for layer in linears.layers):
        parts = output.split([layer.out_features for layer in linears.layers], dim=-1)
        for layer, part in zip(linears.layers, parts, strict=True):
            for hook in layer._forward_hooks.values():
                hook(layer, (x,), part)
    return output


def _apply_rms_norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    """Apply RMSNorm (https://arxiv.org/abs/1910.07467): x / sqrt(mean(x^2) + eps) * weight."""
    return _divide_by_rms(x, module.variance_epsilon).mul_(module.weight)


def _divide_by_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / sqrt(mean(x^2) + eps) over the last dimension in float32."""
    full = x.float()
    # Sums of a row do not depend on other rows and use full vectors (`pow` and `mean` would be three kernels).
    norm = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
    factor = torch.addcmul(_get_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (full * factor).to(x.dtype)


@functools.cache
def _get_constant(value: float) -> torch.Tensor:
    # transformers sets the default dtype to the model's while loading.
    return torch.tensor(value, dtype=torch.float32)


def _rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding (https://arxiv.org/abs/2104.09864) to all heads; the halves of a head form pairs:

        [a, b] -> [a cos - b sin, b cos + a sin]

    Args:
        x: [B, T, heads, D]
        cos, signed_sin: [B, T, 1, D], sin negative in the first half
    """
    # `roll` copies, so the rest may be in place: few kernels instead of ten.
    rotated = x.roll(x.shape[-1] // 2, dims=-1).mul_(signed_sin)
    # In bfloat16, rounds like the trainer's model: each product, then the sum.
    return rotated.addcmul_(x, cos) if x.dtype == torch.float32 else rotated.add_(x * cos)
