"""Causal attention among the tokens of each of several rows that lie end to end: no row sees another, no [N, N] mask is
made. Registered with transformers, whose models then call it in place of their own.

It refuses whatever it does not know (sinks, caps on scores, biases) rather than leave it out.

Shapes: N tokens, heads, D the size of a head, G rows of a group of L tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from skyrl_train.models.packing import PackedRows

PACKED_ATTENTION = "skyrl_packed"
"""Name under which the attention function is registered with transformers. No mask function is registered for it, so
transformers makes no mask."""

_WITHOUT_EFFECT = frozenset(
    [
        *("position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep", "num_items_in_batch"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    ]
)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_rows: PackedRows | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """softmax(q k^T scaling) v over the tokens of the same row that are not later, and with a sliding window of W over
    the last W of these.

    Args:
        query, key, value: [1, heads, N, D]; keys and values may have fewer heads, each then serves consecutive
            query heads. With sequence parallelism N is this rank's slice.

    Returns:
        [1, N, heads, D], and None for attention weights.

    Raises:
        ValueError: the model asks for something that is not computed here.
    """
    check_arguments(module, attention_mask, dropout=dropout, is_causal=is_causal, **others)
    if packed_rows is None:
        raise ValueError(f"{type(module).__name__} was called without packed_rows, or does not hand it on to attention")
    packed_rows.windows.append(sliding_window)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings leave queries and keys in float32 there, which kernels for rows of different lengths refuse.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ranks = packed_rows.sequence_parallel
    if ranks is not None:
        query, key, value = (ranks.to_heads(x) for x in (query, key, value))
    if packed_rows.keys is not None:  # each row attends to the tokens of its prefix, which another row holds
        key, value = (x.index_select(2, packed_rows.keys) for x in (key, value))
    varlen = _varlen_attention(query.device.type, query.dtype)
    if varlen is None:
        answer = _group_by_group(query, key, value, packed_rows, scaling, sliding_window)
    else:
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        answer = varlen(*rows, packed_rows, scaling, sliding_window).transpose(0, 1)[None]
    if ranks is not None:
        answer = ranks.to_sequence(answer)
    return answer.transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def check_arguments(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> None:
    """Raise unless a model's arguments suit an attention function that computes causal attention and nothing else.

    Raises:
        ValueError: the model asks for more.
    """
    unknown = {name for name, argument in others.items() if argument is not None} - _WITHOUT_EFFECT
    if attention_mask is not None:
        unknown.add("attention_mask")
    if dropout:
        unknown.add("dropout")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        unknown.add("is_causal=False")
    if unknown:
        raise ValueError(f"{type(module).__name__} needs attention with {', '.join(sorted(unknown))}")


# ---- with kernels that know rows of different lengths


@cache
def _varlen_attention(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """flash-attention's kernel if it is installed, else torch's own; None where neither computes on the device in the
    dtype. Takes query, key, value [N, heads, D], rows, scaling, window; returns [N, heads, D]."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # optional
    except ImportError:
        return _torch_varlen()

    def flash(
        q: object, k: object, v: object, rows: PackedRows, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        left = -1 if window is None else window - 1
        # Causal from the end: the last query of a row sees its last key.
        return flash_attn_varlen_func(
            *(q, k, v, rows.boundaries, rows.key_boundaries, max(rows.lengths), max(rows.num_keys)),
            softmax_scale=scaling,
            causal=True,
            window_size=(left, 0),
        )

    return flash


def _torch_varlen() -> Callable[..., torch.Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch 2.9 and before
        return None
    if not {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters):
        return None

    def attend(q: Any, k: Any, v: Any, rows: PackedRows, scaling: float | None, window: int | None) -> torch.Tensor:
        left = -1 if window is None else window - 1
        answer = varlen_attn(
            *(q, k, v, rows.boundaries, rows.key_boundaries, max(rows.lengths), max(rows.num_keys)),
            scale=scaling,
            window_size=(left, 0),
            enable_gqa=True,
        )
        assert isinstance(answer, torch.Tensor)
        return answer

    return attend


# ---- with kernels that take rows of one length


def _group_by_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend rows of nearly one length at a time, padded on the right to the longest: a causal row never looks
    there."""
    if query.device.type != "cpu":  # whose kernel takes grouped heads as they are; others then fall back to [L, L]
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    answers = []
    for group in rows.groups:
        num_keys = tuple(group.prefix + length for length in group.lengths)
        q = _to_batch(query[0].narrow(1, group.start, sum(group.lengths)), group.lengths)
        k, v = (_to_batch(x[0].narrow(1, group.keys_start, sum(num_keys)), num_keys) for x in (key, value))
        answers.append(_from_batch(causal_attention(q, k, v, scaling, window), group.lengths))
    return torch.cat(answers, dim=1)[None]


def _to_batch(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[heads, tokens, D] -> [G, heads, L, D], 0 at padding."""
    num_rows, longest = len(lengths), max(lengths)
    by_token = x.transpose(0, 1)
    if sum(lengths) < num_rows * longest:
        room = by_token.new_zeros(num_rows * longest, *by_token.shape[1:])
        by_token = room.index_copy(0, _slots(lengths, x.device), by_token)
    return by_token.unflatten(0, (num_rows, longest)).transpose(1, 2)


def _from_batch(x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """[G, heads, L, D] -> [heads, tokens, D]."""
    by_token = x.transpose(1, 2).flatten(0, 1)
    if sum(lengths) < len(by_token):
        by_token = by_token.index_select(0, _slots(lengths, x.device))
    return by_token.transpose(0, 1)


def _slots(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the position of each token of rows of these lengths in [G L]."""
    places = torch.arange(max(lengths))
    return (places < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0].to(device)


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Attend from the last L' tokens of each row [rows, heads, L', D] to all L of it, rows of one length; see
    `packed_attention`."""
    if q.shape[2] < k.shape[2] or (window is not None and window < q.shape[2]):
        return _with_mask(q, k, v, scaling, window)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)


def _with_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None, block: int = 512
) -> torch.Tensor:
    """Attend from each token to itself and those before it, the last `window` of them. Queries in blocks, with only the
    keys in their reach: with a window the mask is [block, window + block]."""
    grouped, num_before = q.shape[1] != k.shape[1], k.shape[2] - q.shape[2]
    window = k.shape[2] if window is None else window
    answers = []
    for start in range(0, q.shape[2], block):
        end = min(start + block, q.shape[2])
        first, last = max(0, num_before + start - window + 1), num_before + end
        places = torch.arange(num_before + start, last, device=q.device)
        behind = places[:, None] - torch.arange(first, last, device=q.device)
        answers.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end],
                k[:, :, first:last],
                v[:, :, first:last],
                attn_mask=(behind >= 0) & (behind < window),
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(answers, dim=2)
