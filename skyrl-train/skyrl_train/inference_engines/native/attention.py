"""Attention over the slot cache, as an attention implementation that transformers models can be loaded with.

A model loaded with `attn_implementation=ATTENTION_NAME` calls `native_attention` in every layer. What it attends to is
described by an `AttentionStep`, which travels through the model's keyword arguments, so no mask is made by the model.

Dimensions: B rows, H query heads, K key-value heads, G = H / K query heads a key head, T queries a row, L keys a row,
D head width, V that of values.

Bit-exactness (float32 on the CPU): the result of a query is the same whatever the number of rows, the number of queries
computed beside it and the number of keys its row is padded to. Measured with MKL, which holds this to five rules:

- A matrix product has at least `MIN_ROWS` rows: one to three take another kernel.
- Keys are padded to a multiple of `KEY_BLOCK`: the softmax then sums in whole vectors.
- Probabilities times values goes in chunks of `KEY_CHUNK` keys: MKL splits a longer inner dimension by its total length
  (from somewhere above 160 keys), and an added chunk of zero probabilities adds exact zeros.
- Elementwise kernels see whole vectors of `VECTOR` elements (the core fills up rows where a layer is narrow).
- Masked keys are finite, so that 0 * value is 0: the cache is zeroed when allocated and where a row was not finite.

Rows that begin alike hold equal keys, which decoding reads once for all of them (`SharedKeys`; cascade attention, Ye et
al. 2024, but with one softmax over all scores, so that no bit changes): more queries a product, over whole chunks.

Other dtypes and devices go through `scaled_dot_product_attention`, with no such promise.
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
"""Elements that an elementwise kernel takes at a time; what is left at the end takes other arithmetic (`silu`)."""
KEY_BLOCK = VECTOR
KEY_CHUNK = 128
QUERY_CHUNK = 128
"""Queries of a long prompt scored at a time: bounds the memory of the scores."""


def round_up(number: int, multiple: int) -> int:
    """The next multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class SharedKeys:
    """First keys that the rows of a group have in common, to the bit."""

    length: int
    """Number of these keys: a multiple of KEY_CHUNK. A row that is a group of its own may have fewer."""

    groups: tuple[torch.Tensor, ...]
    """Rows of each group; every row is in one. The keys of the first are read for all."""

    @cached_property
    def _first_rows(self) -> list[int]:
        return [int(rows[0]) for rows in self.groups]

    @cached_property
    def _places(self) -> torch.Tensor:
        """[B]: place of each row in the groups laid end to end."""
        return torch.cat(self.groups).argsort()

    def apply(
        self, compute: Callable[[int, torch.Tensor], torch.Tensor], of_rows: torch.Tensor, num_queries: int
    ) -> torch.Tensor:
        """Apply `compute`, which takes a group's first row and what its queries have, [K, queries, X], and returns
        [K, queries, Y].

        Args:
            of_rows: [B, K, M, X], of which the first `num_queries` of M mean something
        Returns: [B, K, M, Y], 0 behind `num_queries`
        """
        parts: list[torch.Tensor] = []
        for first, rows in zip(self._first_rows, self.groups, strict=True):
            own = of_rows[rows, :, :num_queries]
            folded = own.transpose(0, 1).flatten(1, 2)
            missing = max(0, MIN_ROWS - folded.shape[1])
            answer = compute(first, F.pad(folded, (0, 0, 0, missing)) if missing else folded)
            parts.append(answer[:, : folded.shape[1]].unflatten(1, (len(rows), num_queries)).transpose(0, 1))
        whole = torch.cat(parts)[self._places]
        return F.pad(whole, (0, 0, 0, of_rows.shape[2] - num_queries))


@dataclass
class AttentionStep:
    """Visible keys of the queries of one forward pass.

    Args:
        positions: [B, T] position of every query in its row, ascending by 1; [1, T] if it is that of all rows. The keys
            lie at positions 0, 1, 2, … of the row, padded to a common length.
        is_whole: the queries of every row begin at position 0, and the keys are theirs.
        is_decode: the queries of a row are few: its last token, and drafts of what follows.
        shared: of decoding: keys that several rows have in common.
    """

    positions: torch.Tensor
    is_whole: bool = False
    is_decode: bool = False
    shared: SharedKeys | None = None
    _masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def decode_mask(
        self, num_keys: int, sliding_window: int | None, dtype: torch.dtype, num_groups: int
    ) -> torch.Tensor:
        """[B, 1, G * T, L] for folded queries, 0 where a query sees key l, minus infinity elsewhere; [B, 1, 1, L] for
        T = 1. Made once a step, shared by the layers."""
        key = (num_keys, sliding_window)
        if key not in self._masks:
            # [B, T, L] and then a dimension for key heads. Layers differ in their windows only, so a model has at
            # most two masks a step.
            seen = visible(self.positions[:, :, None], num_keys, sliding_window)
            folded = seen if seen.shape[1] == 1 else seen.repeat(1, num_groups, 1)
            self._masks[key] = additive(folded, dtype)[:, None]
        return self._masks[key]


def visible(query_positions: torch.Tensor, num_keys: int, sliding_window: int | None) -> torch.Tensor:
    """True where a query at position p sees key j: j <= p, and j > p - window if there is a window.

    Args:
        query_positions: [..., 1]
    Returns: [..., L]
    """
    keys = torch.arange(num_keys, device=query_positions.device)
    seen = keys <= query_positions
    if sliding_window is not None:
        seen &= keys > query_positions - sliding_window
    return seen


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where seen, minus infinity elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    *,
    shared: SharedKeys | None = None,
    num_queries: int = 0,
) -> torch.Tensor:
    """softmax(cap(scale * q k^T) + mask) v, with the inner dimension of the second product cut into fixed chunks.

    Args:
        query: [B, K, M, D], M >= MIN_ROWS
        key, value: [B, K, L, D] and [B, K, L, V], L a multiple of KEY_BLOCK; views into the cache are taken as they are
        mask: additive, broadcast to [B, K, M, L]
        rule: its sinks, if any, [K, M, 1]; its window is in the mask
        shared: keys read once a group
        num_queries: of M, those that mean something, where keys are shared
    Returns: [B, K, M, V]
    """
    batch, heads, rows, width = query.shape
    scale = width**-0.5 if rule.scaling is None else rule.scaling
    num_shared = 0 if shared is None else shared.length
    # One batch of B * K products. A flatten of two leading dimensions of a contiguous cache is a view: no key is
    # copied.
    keys, values = key.flatten(0, 1)[:, num_shared:], value.flatten(0, 1)[:, num_shared:]
    # The query is scaled, not the scores: T * D products instead of T * L. The order of the two roundings belongs to
    # the promise.
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
            return _weighted(weights, value[row, :, :num_shared])

        output = shared.apply(output_of, probabilities[..., :num_shared], num_queries).flatten(0, 1)
        probabilities = probabilities[..., num_shared:]
    return _weighted(probabilities.flatten(0, 1), values, output).view(batch, heads, rows, -1)


def _weighted(weights: torch.Tensor, values: torch.Tensor, output: torch.Tensor | None = None) -> torch.Tensor:
    """Sum values [N, L, V] by weights [N, M, L], chunk by chunk in the order of the keys, on top of `output` (in place)
    if there is one. Returns: [N, M, V]."""
    for start in range(0, values.shape[1], KEY_CHUNK):
        chunk = weights[:, :, start : start + KEY_CHUNK], values[:, start : start + KEY_CHUNK]
        output = torch.bmm(*chunk) if output is None else output.baddbmm_(*chunk)
    assert output is not None
    return output


def _fold(query: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """[B, H, T, D] -> [B, K, G * T, D]: the queries that share a key head become rows of one matrix."""
    batch, heads, queries, width = query.shape
    return query.reshape(batch, num_key_heads, heads // num_key_heads * queries, width)


def _folded(rule: AttentionRule, num_key_heads: int, num_queries: int, num_rows: int) -> AttentionRule:
    """Give the rule's sinks [H] to folded rows, [K, num_rows, 1]; those that fill up get 0."""
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
        # Zero queries fill up to the number of rows from which on the kernel computes rows alike; their results are
        # cut off.
        folded = F.pad(folded, (0, 0, 0, MIN_ROWS - num_rows))
        if mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, MIN_ROWS - num_rows))
    rule = _folded(rule, key.shape[1], query.shape[2], folded.shape[2])
    answer = grouped_attention(folded, key, value, mask, rule, shared=shared, num_queries=num_rows)[:, :, :num_rows]
    return answer.reshape(*query.shape[:-1], value.shape[-1])


def _prefill_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: AttentionStep,
    rule: AttentionRule,
):
    positions = step.positions
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    # Once: products of every chunk would copy those of a whole prompt, which lie token by token.
    key, value = key.contiguous(), value.contiguous()
    outputs = []
    for start in range(0, queries, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, queries)
        # Only keys up to the last query of the chunk: later ones are masked anyway.
        num_keys = min(round_up(int(positions[:, end - 1].max()) + 1, KEY_BLOCK), key.shape[2])
        # The G query heads of a key head lie one after the other in the folded rows, each with the same positions.
        chunk = positions[:, start:end].repeat(1, groups)
        mask = additive(visible(chunk[:, None, :, None], num_keys, rule.window), query.dtype)
        part = _fold(query[:, :, start:end], key.shape[1])
        of_chunk = _folded(rule, key.shape[1], end - start, part.shape[2])
        output = grouped_attention(part, key[:, :, :num_keys], value[:, :, :num_keys], mask, of_chunk)
        outputs.append(output.reshape(batch, heads, end - start, -1))
    return torch.cat(outputs, dim=2)


def _decode_sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, rule: AttentionRule):
    folded = _fold(query, key.shape[1])
    # Without drafts every folded row of batch row b is at the same position, so one row of the mask serves them.
    mask = mask.expand(-1, 1, folded.shape[2], -1)
    answer = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=rule.scaling)
    return answer.reshape(*query.shape[:-1], value.shape[-1])


def _prefill_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: AttentionStep,
    rule: AttentionRule,
):
    mask = None
    # Where keys begin with the queries, and a window hides nothing, the fused causal kernel needs no mask. Shapes do
    # not tell: of a short prompt both are padded to the same block, whatever comes first.
    if not step.is_whole or (rule.window is not None and rule.window < query.shape[2]):
        mask = visible(step.positions[:, None, :, None], key.shape[2], rule.window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=rule.scaling, enable_gqa=True
    )


def native_attention(
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
    """The attention of one layer; transformers' calling convention.

    Args:
        query: [B, H, T, D]
        key, value: [B, K, L, D] and [B, K, L, V], what the cache's `update` returned
        attention_mask: ignored; `native_step` says what is seen
        softcap, s_aux: caps on scores and sinks [H], see `AttentionRule`
    Returns: [B, T, H, V], and None for the attention weights
    Raises:
        NotImplementedError: the model keeps keyword arguments from its attention.
    """
    if native_step is None:
        raise NotImplementedError("the model's code does not pass keyword arguments on to its attention")
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    # The rules above were measured for these kernels only. GPU kernels split by the total length in their own way.
    # Fused kernels know neither caps nor sinks.
    exact = not rule.is_plain or (query.device.type == "cpu" and query.dtype == torch.float32)
    if native_step.is_decode:
        mask = native_step.decode_mask(key.shape[2], sliding_window, query.dtype, query.shape[1] // key.shape[1])
        if exact:
            output = _decode_exact(query, key, value, mask, rule, native_step.shared)
        else:
            output = _decode_sdpa(query, key, value, mask, rule)
    else:
        prefill = _prefill_exact if exact else _prefill_sdpa
        output = prefill(query, key, value, native_step, rule)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAME, native_attention)
