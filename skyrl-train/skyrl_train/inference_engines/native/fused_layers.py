"""Decoders with half the kernels of transformers' modules, for inference on a CPU: of the Llama family, whose
layers are all

    h += W_o attention(rotate(W_q n), rotate(W_k n), W_v n)    with n = norm(h); Qwen3 norms each head before it rotates
    h += W_down (act(W_gate n) * W_up n)                       with n = norm(h)

One product computes layers of one input, rotation and norms take queries and keys together, sums are in place, and the
second line goes through a long prompt in parts that stay in the processor's cache. Numbers differ from those of
transformers' modules by rounding; a row's bits do not depend on other rows: all kernels work row by row.

Adapters (`lora.py`) are hooks of the linear layers, run on each one's part of a product. A pass without an
`AttentionStep` (the trial at loading) takes transformers' own way.

Dimensions: B rows, T tokens a row, H query heads, K key-value heads, D head width.
"""

import functools
import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from skyrl_train.inference_engines.native.attention import AttentionStep, native_attention
from skyrl_train.inference_engines.native.cache import SlotCache
from skyrl_train.inference_engines.native.packed_linear import PackedLinears

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of transformers whose decoder layers compute the above."""
_PART = 256
"""Tokens that go through a feed-forward layer together, about: its activations stay in the second-level cache."""


def fuse_layers(model: nn.Module) -> None:
    """Let decoders on a CPU whose layers this module knows compute by `FusedDecoder`. Weights and their names stay;
    `pack_linears` packs them."""
    for module in model.modules():
        if _is_known(module) and next(module.parameters()).device.type == "cpu":
            module.forward = FusedDecoder(module)


def _is_known(decoder: nn.Module) -> bool:
    """Check that a decoder is one of the family's with all of its parts: a model of one's own may replace any of them,
    and its numbers may be those of the family until it is trained."""
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
        if native_step is None:  # not the engine's pass: no cache of ours, and attention of any kind
            return type(decoder).forward(decoder, **keywords)
        cache: SlotCache = keywords["past_key_values"]
        hidden_states = keywords.get("inputs_embeds")
        if hidden_states is None:
            hidden_states = decoder.embed_tokens(keywords["input_ids"])
        cos, sin = decoder.rotary_emb(hidden_states, keywords["position_ids"])
        first, second = sin.chunk(2, dim=-1)
        rotation = cos[:, :, None], torch.cat([-first, second], dim=-1)[:, :, None]
        for layer in self._layers:
            hidden_states = layer(hidden_states, rotation, cache, native_step)
        states: Any = _norm(hidden_states, decoder.norm)
        return BaseModelOutputWithPast(last_hidden_state=states)


class FusedDecoderLayer:
    """One layer of a decoder."""

    def __init__(self, layer: Any):
        self._layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        self._qkv = PackedLinears(attention.q_proj, attention.k_proj, attention.v_proj)
        self._gate_up = PackedLinears(mlp.gate_proj, mlp.up_proj)
        self._head_dim = attention.head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._num_key_heads = attention.k_proj.out_features // self._head_dim
        # Of Mistral's layers, all have the window of the config; of Qwen's, some; of Llama's, none.
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
        """[B, T, hidden] -> [B, T, hidden]

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
        projected = _project(self._qkv, _norm(hidden_states, layer.input_layernorm))
        # Views from here to the norm: queries, keys and values of a token lie side by side.
        heads = projected.unflatten(-1, (-1, self._head_dim))
        rotated, values = heads.split([self._num_heads + self._num_key_heads, self._num_key_heads], dim=2)
        if hasattr(attention, "q_norm"):
            # The weights as they are, by two kernels: a copy of both in one would have to follow their updates.
            rotated = _over_rms(rotated, attention.q_norm.variance_epsilon)
            rotated[:, :, : self._num_heads].mul_(attention.q_norm.weight)
            rotated[:, :, self._num_heads :].mul_(attention.k_norm.weight)
        rotated = _rotate(rotated, *rotation).transpose(1, 2)
        queries, new_keys = rotated[:, : self._num_heads], rotated[:, self._num_heads :]
        keys, values = cache.update(new_keys, values.transpose(1, 2), attention.layer_idx)
        output, _ = native_attention(
            attention,
            queries,
            keys,
            values,
            None,
            native_step=step,
            scaling=attention.scaling,
            sliding_window=self._window,
        )
        # In place: a product is a tensor of its own, also where an adapter has added to it.
        return attention.o_proj(output.flatten(2)).add_(hidden_states)

    def _add_feed_forward(self, hidden_states: torch.Tensor) -> None:
        """Add the feed-forward layer to states [N, hidden], in place."""
        mlp = self._layer.mlp
        # Hooks of adapters expect all rows at once.
        has_hooks = any(layer._forward_hooks for layer in (*self._gate_up.layers, mlp.down_proj))
        # Parts of one size, almost: none has too few rows for the kernels of the others.
        num_parts = 1 if has_hooks else -(-len(hidden_states) // _PART)
        for part in hidden_states.tensor_split(num_parts):
            gate, up = _project(self._gate_up, _norm(part, self._layer.post_attention_layernorm)).chunk(2, dim=-1)
            part.add_(mlp.down_proj(mlp.act_fn(gate).mul_(up)))


def _project(linears: PackedLinears, x: torch.Tensor) -> torch.Tensor:
    """Compute layers side by side, with their hooks."""
    output = linears(x)
    if any(layer._forward_hooks for layer in linears.layers):
        parts = output.split([layer.out_features for layer in linears.layers], dim=-1)
        for layer, part in zip(linears.layers, parts, strict=True):
            for hook in layer._forward_hooks.values():
                hook(layer, (x,), part)
    return output


def _norm(x: torch.Tensor, module: Any) -> torch.Tensor:
    """RMSNorm (https://arxiv.org/abs/1910.07467): x / sqrt(mean(x^2) + eps) * weight."""
    return _over_rms(x, module.variance_epsilon).mul_(module.weight)


def _over_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32."""
    full = x.float()
    # Sums of a row do not depend on other rows, and are taken in whole vectors (`pow` and `mean` are three kernels).
    norm = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
    factor = torch.addcmul(_constant(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (full * factor).to(x.dtype)


@functools.cache
def _constant(value: float) -> torch.Tensor:
    # The default dtype is that of a model while transformers loads one.
    return torch.tensor(value, dtype=torch.float32)


def _rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of all heads, halves of a head being pairs:

        [a, b] -> [a cos - b sin, b cos + a sin]

    Args:
        x: [B, T, heads, D]
        cos, signed_sin: [B, T, 1, D], sin negative in the first half
    """
    # `roll` copies, so the rest may be in place: few kernels for queries and keys, where there were ten.
    rotated = x.roll(x.shape[-1] // 2, dims=-1).mul_(signed_sin)
    # In bfloat16 rounded as the trainer's model rounds: each product, then the sum.
    return rotated.addcmul_(x, cos) if x.dtype == torch.float32 else rotated.add_(x * cos)
