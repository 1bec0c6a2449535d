"""Attention over the slot cache, as an attention implementation that transformers models can be loaded with.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `compute_native_attention` in every layer. An
`AttentionStep`, passed through the model's keyword arguments, defines the visible keys, so the model builds no mask.

Dimensions: B rows, H query heads, K key-value heads, G = H / K query heads per key head, T queries per row, L keys per
    row, D head width, V value width.

Bit-exactness (float32 on the CPU): the result of a query does not depend on the number of rows, on other queries in the
batch, or on the padded number of keys. Measured with MKL, under five rules:

- A matrix product has at least `MIN_ROWS` rows: one to three use another kernel.
- Keys are padded to a multiple of `KEY_BLOCK`: the softmax then sums full vectors.
- Probabilities times values is computed in chunks of `KEY_CHUNK` keys: MKL splits a longer inner dimension by its total
  length (from somewhere above 160 keys), and an added chunk of zero probabilities adds exact zeros.
- Elementwise kernels process full vectors of `VECTOR` elements (the core pads rows if a layer is narrow).
- Masked keys are finite, so that 0 * value is 0: the cache is zeroed on allocation and in rows with non-finite values.

Rows with a common prefix have equal keys, which decoding reads once for all of them (`SharedKeys`; cascade attention,
Ye et al. 2024, but with one softmax over all scores to stay bit-exact): more queries per product, over full chunks.

Other dtypes and devices use `scaled_dot_product_attention`, without this guarantee.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from skyrl_train.models.attention import AttentionRule, cap_scores, compute_softmax_with_sinks

ATTENTION_NAME = "skyrl_native"
MIN_ROWS = 4
VECTOR = 32
"""Vector length of elementwise kernels; the remainder uses different arithmetic (`silu`)."""
KEY_BLOCK = VECTOR
KEY_CHUNK = 128
QUERY_CHUNK = 128
"""Queries of a long prompt that are scored together; bounds the memory of the scores."""


def round_up(number: int, multiple: int) -> int:
    """Round `number` up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class SharedKeys:
    """Bit-identical leading keys that the rows of a group share."""

    length: int
    """Number of shared keys, a multiple of KEY_CHUNK. A single-row group may have fewer."""

    groups: tuple[torch.Tensor, ...]
    """Rows of each group; every row belongs to one. The first row's keys are read for all."""

    @cached_property
    def _first_rows(self) -> list[int]:
        return [int(rows[0]) for rows in self.groups]

    @cached_property
    def _positions(self) -> torch.Tensor:
        """[B]: position of each row in the concatenated groups."""
        return torch.cat(self.groups).argsort()

    def apply(
        self, compute: Callable[[int, torch.Tensor], torch.Tensor], of_rows: torch.Tensor, num_queries: int
    ) -> torch.Tensor:
        """Apply `compute` per group. It takes the group's first row and per-query values [K, queries, X], and returns
        [K, queries, Y].

        Args:
            of_rows: [B, K, M, X]; only the first `num_queries` of M are valid
        Returns: [B, K, M, Y], 0 after `num_queries`
        """
        parts: list[torch.Tensor] = []
        for first, rows in zip(self._first_rows, self.groups, strict=True):
            own = of_rows[rows, :, :num_queries]
            folded = own.transpose(0, 1).flatten(1, 2)
            missing = max(0, MIN_ROWS - folded.shape[1])
            answer = compute(first, F.pad(folded, (0, 0, 0, missing)) if missing else folded)
            parts.append(answer[:, : folded.shape[1]].unflatten(1, (len(rows), num_queries)).transpose(0, 1))
        whole = torch.cat(parts)[self._positions]
        return F.pad(whole, (0, 0, 0, of_rows.shape[2] - num_queries))


@dataclass
class AttentionStep:
    """Visible keys of the queries of one forward pass.

    Args:
        positions: [B, T] position of every query in its row, ascending by 1; [1, T] if equal in all rows. Keys have
            positions 0, 1, 2, … of the row, padded to a common length.
        is_whole: the queries of every row begin at position 0, and the keys belong to the same tokens.
        is_decode: each row has few queries: its last token and draft tokens.
        shared: in decoding, keys shared by several rows.
    """

    positions: torch.Tensor
    is_whole: bool = False
    is_decode: bool = False
    shared: SharedKeys | None = None
    _masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def decode_mask(
        self, num_keys: int, sliding_window: int | None, dtype: torch.dtype, num_groups: int
    ) -> torch.Tensor:
        """Additive mask [B, 1, G * T, L] for folded queries, 0 at visible keys, minus infinity elsewhere; [B, 1, 1, L]
        for T = 1. Built once per step and shared by the layers.
        """
        key = (num_keys, sliding_window)
        if key not in self._masks:
            # [B, T, L] plus a dimension for key heads. Layers differ only in their windows, so a model has at most two
            # masks a step.
            seen = compute_visible(self.positions[:, :, None], num_keys, sliding_window)
            folded = seen if seen.shape[1] == 1 else seen.repeat(1, num_groups, 1)
            self._masks[key] = to_additive_mask(folded, dtype)[:, None]
        return self._masks[key]


def compute_visible(query_positions: torch.Tensor, num_keys: int, sliding_window: int | None) -> torch.Tensor:
    """Compute where a query at position p sees key j: j <= p, and j > p - window if a window is set.

    Args:
        query_positions: [..., 1]
    Returns: [..., L]
    """
    keys = torch.arange(num_keys, device=query_positions.device)
    seen = keys <= query_positions
    if sliding_window is not None:
        seen &= keys > query_positions - sliding_window
    return seen


def to_additive_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a visibility mask to 0 where visible, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def compute_grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    *,
    shared: SharedKeys | None = None,
    num_queries: int = 0,
) -> torch.Tensor:
    """Compute softmax(cap(scale * q k^T) + mask) v, with the inner dimension of the second product split into fixed
    chunks.

    Args:
        query: [B, K, M, D], M >= MIN_ROWS
        key, value: [B, K, L, D] and [B, K, L, V], L a multiple of KEY_BLOCK; may be views of the cache
        mask: additive, broadcast to [B, K, M, L]
        rule: sinks, if any, [K, M, 1]; the window is in the mask
        shared: keys read once per group
        num_queries: number of valid queries of M, if keys are shared
    Returns: [B, K, M, V]
    """
    batch, heads, rows, width = query.shape
    scale = width**-0.5 if rule.scaling is None else rule.scaling
    num_shared = 0 if shared is None else shared.length
    # One batch of B * K products. Flattening two leading dimensions of a contiguous cache is a view: no key is copied.
    keys, values = key.flatten(0, 1)[:, num_shared:], value.flatten(0, 1)[:, num_shared:]
    # The query is scaled, not the scores: T * D products instead of T * L. The order of the two roundings is part of
    # the guarantee.
    query = query * scale
    scores = torch.bmm(query.flatten(0, 1), keys.mT).view(batch, heads, rows, -1)
    if shared is not None:

        def scores_of(row: int, queries: torch.Tensor) -> torch.Tensor:
            return torch.bmm(queries, key[row, :, :num_shared].mT)

        scores = torch.cat([shared.apply(scores_of, query, num_queries), scores], dim=-1)
    scores = cap_scores(scores, rule.softcap).add_(mask)
    probabilities = compute_softmax_with_sinks(scores, rule.sinks).to(values.dtype)
    output = None
    if shared is not None:

        def output_of(row: int, weights: torch.Tensor) -> torch.Tensor:
            return _sum_weighted(weights, value[row, :, :num_shared])

        output = shared.apply(output_of, probabilities[..., :num_shared], num_queries).flatten(0, 1)
        probabilities = probabilities[..., num_shared:]
    return _sum_weighted(probabilities.flatten(0, 1), values, output).view(batch, heads, rows, -1)


def _sum_weighted(weights: torch.Tensor, values: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """Sum values [N, L, V] by weights [N, M, L], chunk by chunk in the order of the keys, added to `output` in place if
    given. Returns [N, M, V].
    """
    for start in range(0, values.shape[1], KEY_CHUNK):
        chunk = weights[:, :, start : start + KEY_CHUNK], values[:, start : start + KEY_CHUNK]
        output = torch.bmm(*chunk) if output is None else output.baddbmm_(*chunk)
    assert output is not None
    return output


def _fold(query: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """Reshape [B, H, T, D] to [B, K, G * T, D]: queries that share a key head become rows of one matrix."""
    batch, heads, queries, width = query.shape
    return query.reshape(batch, num_key_heads, heads // num_key_heads * queries, width)


def _fold_sinks(rule: AttentionRule, num_key_heads: int, num_queries: int, num_rows: int) -> AttentionRule:
    """Expand the rule's sinks [H] to folded rows, [K, num_rows, 1]; padding rows get 0."""
    if rule.sinks is None:
        return rule
    of_rows = rule.sinks.view(num_key_heads, -1, 1).repeat_interleave(num_queries, dim=1)
    return rule._replace(sinks=F.pad(of_rows, (0, 0, 0, num_rows - of_rows.shape[1])))


def _decode_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    shared: SharedKeys | None,
):
    folded = _fold(query, key.shape[1])
    num_rows = folded.shape[2]
    if num_rows < MIN_ROWS:
        # Zero queries pad to the number of rows from which the kernel is independent of the row count; their results
        # are cut off.
        folded = F.pad(folded, (0, 0, 0, MIN_ROWS - num_rows))
        if mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, MIN_ROWS - num_rows))
    rule = _fold_sinks(rule, key.shape[1], query.shape[2], folded.shape[2])
    answer = compute_grouped_attention(folded, key, value, mask, rule, shared=shared, num_queries=num_rows)[
        :, :, :num_rows
    ]
    return answer.reshape(*query.shape[:-1], value.shape[-1])


def _compute_prefill_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: AttentionStep,
    rule: AttentionRule,
):
    positions = step.positions
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    # Once here: products of every chunk would copy the values of a whole prompt, which are stored token by token.
    key, value = key.contiguous(), value.contiguous()
    outputs = []
    for start in range(0, queries, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, queries)
        # Only keys up to the last query of the chunk; later ones are masked.
        num_keys = min(round_up(int(positions[:, end - 1].max()) + 1, KEY_BLOCK), key.shape[2])
        # The G query heads of a key head are consecutive in the folded rows, with equal positions.
        chunk = positions[:, start:end].repeat(1, groups)
        mask = to_additive_mask(compute_visible(chunk[:, None, :, None], num_keys, rule.window), query.dtype)
        part = _fold(query[:, :, start:end], key.shape[1])
        of_chunk = _fold_sinks(rule, key.shape[1], end - start, part.shape[2])
        output = compute_grouped_attention(part, key[:, :, :num_keys], value[:, :, :num_keys], mask, of_chunk)
        outputs.append(output.reshape(batch, heads, end - start, -1))
    return torch.cat(outputs, dim=2)


def _decode_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, rule: AttentionRule):
    folded = _fold(query, key.shape[1])
    # Without drafts every folded row of batch row b is at the same position, so one row of the mask serves them.
    mask = mask.expand(-1, 1, folded.shape[2], -1)
    answer = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=rule.scaling)
    return answer.reshape(*query.shape[:-1], value.shape[-1])


def _compute_prefill_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: AttentionStep,
    rule: AttentionRule,
):
    mask = None
    # If keys begin with the queries and no window applies, the fused causal kernel needs no mask. Shapes do not
    # suffice: queries and keys of a short prompt are padded to the same block, whatever comes first.
    if not step.is_whole or (rule.window is not None and rule.window < query.shape[2]):
        mask = compute_visible(step.positions[:, None, :, None], key.shape[2], rule.window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=rule.scaling, enable_gqa=True
    )


def compute_native_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    native_step: AttentionStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: object,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer, with transformers' calling convention.

    Args:
        query: [B, H, T, D]
        key, value: [B, K, L, D] and [B, K, L, V], as returned by the cache's `update`
        attention_mask: ignored; `native_step` defines visibility
        softcap, s_aux: caps on scores and sinks [H], see `AttentionRule`
    Returns: [B, T, H, V], and None for the attention weights
    Raises:
        NotImplementedError: the model does not pass keyword arguments to its attention.
    """
    if native_step is None:
        raise NotImplementedError("the model's code does not pass keyword arguments on to its attention")
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    # The rules above were measured for these kernels only. GPU kernels split by total length differently. Fused kernels
    # support neither caps nor sinks.
    exact = not rule.is_plain or (query.device.type == "cpu" and query.dtype == torch.float32)
    if native_step.is_decode:
        mask = native_step.decode_mask(key.shape[2], sliding_window, query.dtype, query.shape[1] // key.shape[1])
        if exact:
            output = _decode_exact(query, key, value, mask, rule, native_step.shared)
        else:
            output = _decode_sdpa(query, key, value, mask, rule)
    else:
        prefill = _compute_prefill_exact if exact else _compute_prefill_sdpa
        output = prefill(query, key, value, native_step, rule)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, compute_native_attention)
