"""Causal attention over packed rows: rows do not see each other, and no [N, N] mask is allocated. Registered with
transformers, so that its models call it instead of their attention.

Unsupported arguments (biases, custom masks) raise an error instead of being ignored.

Shapes: N tokens, heads, D the size of a head, G rows of a group of L tokens.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from loguru import logger
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from skyrl_train.models.cpu_attention import BackwardInFloat32, is_slow_backward
from skyrl_train.models.packing import PackedRows, from_batch, to_batch

PACKED_ATTENTION = "skyrl_packed"
"""Name under which the attention function is registered with transformers. No mask function is registered, so that
transformers creates no mask."""

_WITHOUT_EFFECT = frozenset(
    [
        *("position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep", "num_items_in_batch"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    ]
)


class AttentionRule(NamedTuple):
    """Attention scores to probabilities: softmax over [z, sink] without the sink's column, z = c tanh(s / c) of the
    scores s = scaling q k^T of the last W tokens."""

    scaling: float | None = None
    """None: D ** -0.5."""
    window: int | None = None
    """W; None: all previous tokens."""
    softcap: float | None = None
    """c: Gemma 2's `attn_logit_softcapping`; None: z = s."""
    sinks: torch.Tensor | None = None
    """[heads] logits of gpt-oss that absorb probability and contribute no value; None: none."""

    @property
    def is_plain(self) -> bool:
        """True if fused kernels support it."""
        return self.softcap is None and self.sinks is None


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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute softmax(q k^T scaling) v over the current and previous tokens of the same row, with a sliding window over
    the last W of them; with caps and sinks as in `AttentionRule`.

    Args:
        query, key, value: [1, heads, N, D]; keys and values may have fewer heads, each shared by consecutive query
            heads. With sequence parallelism N is this rank's slice. Values may have a smaller D.

    Returns:
        [1, N, heads, D], and None for attention weights.

    Raises:
        ValueError: the model requests an unsupported feature.
    """
    check_arguments(module, attention_mask, dropout=dropout, is_causal=is_causal, **others)
    if packed_rows is None:
        raise ValueError(
            f"{type(module).__name__} was called without packed_rows, or does not pass it on to its attention"
        )
    packed_rows.windows.append(sliding_window)
    packed_rows.softcaps.append(softcap)
    if torch.is_autocast_enabled(query.device.type):
        # Rotary embeddings leave queries and keys in float32 there, which variable-length kernels reject.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ranks = packed_rows.sequence_parallel
    if ranks is not None:
        query, key, value = (ranks.to_heads(x) for x in (query, key, value))
        # Rank r holds the heads from r H/n, and so their sinks.
        s_aux = None if s_aux is None else s_aux.chunk(ranks.size)[ranks.rank]
    if packed_rows.keys is not None:  # each row attends to the tokens of its prefix, which are stored in another row
        key, value = (x.index_select(2, packed_rows.keys) for x in (key, value))
    # Variable-length kernels support scaling and window only.
    rule = AttentionRule(scaling, sliding_window, softcap, s_aux)
    varlen = _select_varlen_attention(query.device.type, query.dtype) if rule.is_plain else None
    if varlen is None and query.device.type == "cuda":
        _warn_of_padded_rows(rule.is_plain, query.dtype)
    if varlen is None:
        answer = _attend_by_group(query, key, value, packed_rows, rule)
    else:
        width = value.shape[-1]
        # These kernels need equal head sizes.
        value = F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        answer = varlen(*rows, packed_rows, scaling, sliding_window)[..., :width].transpose(0, 1)[None]
    if ranks is not None:
        answer = ranks.to_sequence(answer)
    return answer.transpose(1, 2).contiguous(), None


# Not compiled with the layers: its groups of rows differ in every micro-batch.
AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))


def check_arguments(
    module: nn.Module,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: object,
) -> None:
    """Check that a model's arguments suit an attention function that computes plain causal attention.

    Raises:
        ValueError: the model requests more.
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
def _select_varlen_attention(device: str, dtype: torch.dtype) -> Callable[..., torch.Tensor] | None:
    """Select flash-attention's kernel if it is installed, else torch's; None if neither supports device and dtype. It
    takes query, key, value [N, heads, D], rows, scaling, window; returns [N, heads, D]."""
    if device != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]  # optional
    except ImportError:
        return _import_torch_varlen()

    def run_flash(
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

    return run_flash


def _import_torch_varlen() -> Callable[..., torch.Tensor] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch 2.9 and before
        return None
    return adapt_torch_varlen(varlen_attn)


def adapt_torch_varlen(varlen_attn: Callable[..., Any]) -> Callable[..., torch.Tensor] | None:
    """Adapt torch's `varlen_attn` to `_select_varlen_attention`'s interface, by the parameters that it has: grouped
    heads (`enable_gqa`) since torch 2.12, `window_size` and `scale` since 2.11. Return None before."""
    parameters = inspect.signature(varlen_attn).parameters
    if not {"window_size", "scale"} <= set(parameters):
        return None
    has_groups = "enable_gqa" in parameters
    options = {"enable_gqa": True} if has_groups else {}

    def run_torch(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PackedRows, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        if not has_groups:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        left = -1 if window is None else window - 1
        answer = varlen_attn(
            *(q, k, v, rows.boundaries, rows.key_boundaries, max(rows.lengths), max(rows.num_keys)),
            scale=scaling,
            window_size=(left, 0),
            **options,
        )
        assert isinstance(answer, torch.Tensor)
        return answer

    return run_torch


@cache  # once per process and cause
def _warn_of_padded_rows(is_plain: bool, dtype: torch.dtype) -> None:
    if not is_plain:
        cause = "this model caps attention scores or has sinks, which no variable-length kernel supports"
    elif dtype not in (torch.bfloat16, torch.float16):
        cause = f"variable-length kernels need bfloat16, not {dtype}; set trainer.bf16=true"
    else:
        cause = f"torch {torch.__version__} has no usable varlen_attn; install flash-attn or torch 2.11 or later"
    logger.warning(f"attention of packed rows pads them, and uses dense masks for windows and shared prefixes: {cause}")


# ---- with kernels that take rows of one length


def _attend_by_group(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: PackedRows,
    rule: AttentionRule,
) -> torch.Tensor:
    """Attend groups of rows of similar length, padded on the right to the longest: causal rows never attend to the
    padding."""
    if (
        query.device.type != "cpu" and rule.is_plain
    ):  # the CPU's kernel supports grouped heads; other devices fall back to [L, L]
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    answers = []
    for group in rows.groups:
        num_keys = tuple(group.prefix + length for length in group.lengths)
        q = to_batch(query[0].narrow(1, group.start, sum(group.lengths)), group.lengths)
        k, v = (to_batch(x[0].narrow(1, group.keys_start, sum(num_keys)), num_keys) for x in (key, value))
        answers.append(from_batch(compute_causal_attention(q, k, v, rule), group.lengths))
    return torch.cat(answers, dim=1)[None]


def compute_causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Attend from the last L' tokens of each row [rows, heads, L', D] to all L tokens, for rows of equal length; see
    `packed_attention`."""
    is_whole = q.shape[2] == k.shape[2] and (rule.window is None or rule.window >= q.shape[2])
    if not rule.is_plain:
        return _attend_in_blocks(q, k, v, rule, _attend_eager)
    return _attend_fused(q, k, v, None, rule) if is_whole else _attend_in_blocks(q, k, v, rule, _attend_fused)


def _attend_fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, rule: AttentionRule
) -> torch.Tensor:
    """Attend with torch's fused kernel. `seen`: [block, keys] bool; None: causal."""
    if is_slow_backward(q, k, v):
        return BackwardInFloat32.attend(q, k, v, seen, rule.scaling)
    how: dict[str, Any] = dict(attn_mask=seen, is_causal=seen is None, scale=rule.scaling)
    return F.scaled_dot_product_attention(q, k, v, **how, enable_gqa=q.shape[1] != k.shape[1])


def _attend_in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: AttentionRule,
    attend: Callable[..., torch.Tensor],
    block: int = 512,
) -> torch.Tensor:
    """Attend from each token to itself and previous tokens, the last `rule.window` of them. Queries are processed in
    blocks with only the keys in reach: with a window the mask is [block, window + block]."""
    num_before = k.shape[2] - q.shape[2]
    window = k.shape[2] if rule.window is None else rule.window
    answers = []
    for start in range(0, q.shape[2], block):
        end = min(start + block, q.shape[2])
        first, last = max(0, num_before + start - window + 1), num_before + end
        places = torch.arange(num_before + start, last, device=q.device)
        behind = places[:, None] - torch.arange(first, last, device=q.device)
        seen = (behind >= 0) & (behind < window)
        answers.append(attend(q[:, :, start:end], k[:, :, first:last], v[:, :, first:last], seen, rule))
    return torch.cat(answers, dim=2)


def _attend_eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """Attend without a fused kernel, for rules that none supports. The backward recomputes probabilities: for long
    rows, the probabilities of all blocks would not fit in memory.

    Args:
        seen: [block, keys] bool
    """
    compute = partial(_compute_weighted_values, seen=seen, softcap=rule.softcap)
    # Queries are scaled, not scores: fewer products, and caps then apply to the same values as in the model's
    # attention.
    q = q * (q.shape[-1] ** -0.5 if rule.scaling is None else rule.scaling)
    # Nothing is saved without a backward.
    if not torch.is_grad_enabled():
        return compute(q, k, v, rule.sinks)
    answer = checkpoint(compute, q, k, v, rule.sinks, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(answer, torch.Tensor)
    return answer


def _compute_weighted_values(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *,
    seen: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    # The mask is applied after the cap, which would make minus infinity finite.
    scores = cap_scores(q @ k.transpose(2, 3), softcap).float().masked_fill(~seen, -torch.inf)
    return compute_softmax_with_sinks(scores, None if sinks is None else sinks[:, None, None]).to(v.dtype) @ v


def cap_scores(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Compute c tanh(s / c)."""
    return scores if softcap is None else (scores / softcap).tanh() * softcap


_SINK_COLUMNS = 32
"""A sink is the first of this many columns, the others are masked: kernels then sum whole vectors, in any batch."""


def compute_softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Compute softmax over [scores, sink] in float32, without the column of the sink.

    Args:
        scores: [..., L]
        sinks: [..., 1], broadcast to scores; None: plain softmax.
    """
    if sinks is None:
        return scores.softmax(dim=-1, dtype=torch.float32)
    # After the scores: a longer row then adds exact zeros between them, and no bit of the sum changes.
    columns = F.pad(sinks.float(), (0, _SINK_COLUMNS - 1), value=-torch.inf)
    both = torch.cat([scores.float(), columns.expand(*scores.shape[:-1], -1)], dim=-1)
    return both.softmax(dim=-1)[..., : scores.shape[-1]]
