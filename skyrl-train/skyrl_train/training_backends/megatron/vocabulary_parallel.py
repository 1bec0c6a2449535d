"""Log-probs and entropy of tokens when tensor-parallel ranks hold shards of the output layer's vocabulary.

The same chunks, temperature and formulas as in `models/token_log_probs.py`; maxima and sums over the vocabulary are
reduced over the ranks. No rank ever holds more than one chunk of its shard's logits.

Shapes: N tokens, C tokens of a chunk, H hidden size, V vocabulary entries of a rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.models.cpu_linear import multiply_transposed


@dataclass(frozen=True)
class VocabularyShard:
    """Part of the vocabulary held by a rank as rows of the output layer."""

    group: dist.ProcessGroup
    first: int
    """First vocabulary id."""

    count: int
    """Number of ids, without the padding at the end."""


@dataclass(frozen=True)
class _ChunkSettings:
    shard: VocabularyShard
    temperature: float
    chunk_size: int
    with_entropy: bool


def compute_token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    shard: VocabularyShard,
    *,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the log-prob of each label under softmax(hidden W^T / temperature), and the entropy in nats. A collective
    of the ranks of the shard.

    Args:
        hidden: [N, H], the same on every rank. Its gradient is this rank's part of a sum over ranks.
        weight: [V, H], including padding rows at the end.
        labels: [N], ids of the whole vocabulary.

    Returns:
        log_probs [N] and, if requested, entropy [N], the same on every rank.
    """
    settings = _ChunkSettings(shard, temperature, chunk_size, with_entropy)
    return _VocabularyParallel.apply(hidden, weight, labels, settings)  # type: ignore[return-value, misc]


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, settings: _ChunkSettings
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        log_probs, log_norm, entropy = (torch.zeros(len(hidden), device=hidden.device) for _ in range(3))
        for chunk in _iter_chunks(len(hidden), settings.chunk_size):
            log_probs[chunk], log_norm[chunk], entropy[chunk] = _compute_scores(
                hidden[chunk], weight, labels[chunk], settings
            )
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, labels, log_norm, entropy)
        ctx.set_materialize_grads(False)
        return log_probs, entropy if settings.with_entropy else None

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_norm, entropy = ctx.saved_tensors
        settings: _ChunkSettings = ctx.settings
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_norm)
        grad_hidden = torch.zeros_like(hidden)
        # float32 for any dtype of the weight: there may be hundreds of chunks.
        grad_weight = torch.zeros(weight.shape, device=weight.device)
        for chunk in _iter_chunks(len(hidden), settings.chunk_size):
            log_p = _compute_logits(hidden[chunk], weight, settings).sub_(log_norm[chunk, None])
            g, e = grad_log_probs[chunk, None], None if grad_entropy is None else grad_entropy[chunk, None]
            # d log p(label) / dz_v = [v = label] - p_v          dH / dz_v = -p_v (log p_v + H)
            if e is None:
                grad = log_p.exp_().mul_(-g)
            else:
                p = log_p.exp()
                # Padding has log p = -inf and p = 0, whose product is NaN.
                grad = torch.where(p > 0, (log_p + entropy[chunk, None]) * -e - g, 0.0).mul_(p)
            own, places = _select_own_labels(labels[chunk], settings.shard)
            grad.scatter_add_(1, places[:, None], torch.where(own[:, None], g, 0.0))
            grad = grad.div_(settings.temperature).to(weight.dtype)
            grad_hidden[chunk] = multiply_transposed(grad, weight.t()).to(hidden.dtype)
            grad_weight += multiply_transposed(grad.t(), hidden[chunk].to(weight.dtype).t())
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _compute_logits(hidden: torch.Tensor, weight: torch.Tensor, settings: _ChunkSettings) -> torch.Tensor:
    """Compute the logits of this rank's shard over the temperature, [C, V] float32; -inf at padding."""
    logits = multiply_transposed(hidden.to(weight.dtype), weight).float()
    if settings.temperature != 1.0:
        logits = logits.div_(settings.temperature)
    logits[:, settings.shard.count :] = -torch.inf
    return logits


def _compute_scores(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, settings: _ChunkSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute log_probs, logsumexp and entropy of a chunk, each [C]; entropy is 0 if not requested."""
    logits, group = _compute_logits(hidden, weight, settings), settings.shard.group
    largest = logits.amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    # exp of the differences cannot overflow; `largest` is added back to the logarithm of their sum.
    logits -= largest[:, None]
    own, places = _select_own_labels(labels, settings.shard)
    of_label = torch.where(own, logits.gather(1, places[:, None])[:, 0], 0.0)
    powers = logits.exp()
    weighted = torch.where(powers > 0, powers * logits, 0.0).sum(dim=-1) if settings.with_entropy else of_label * 0
    # One reduction for all three, because latency dominates its cost.
    sums = torch.stack([of_label, powers.sum(dim=-1), weighted])
    dist.all_reduce(sums, group=group)
    of_label, total, weighted = sums
    log_total = total.log()
    return of_label - log_total, log_total + largest, log_total - weighted / total


def _select_own_labels(labels: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which labels are in this rank's shard [C] bool, and their rows there [C] (0 for others)."""
    places = labels - shard.first
    own = (places >= 0) & (places < shard.count)
    return own, torch.where(own, places, 0)


def _iter_chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))
