"""Log-probs and entropy of tokens from hidden states, without holding the logits of all tokens.

Logits are computed for `chunk_size` tokens at a time and discarded; the backward recomputes them. The peak is one chunk
of float32 logits (two with entropy) and the gradient of the output layer, for any number of tokens. Independent of
models: uses only hidden states and the output weight.

Shapes: N tokens, C tokens of a chunk, H hidden size, V vocabulary size, K candidates of a token.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from skyrl_train.models.cpu_linear import multiply_transposed


@dataclass(frozen=True)
class LogitRule:
    """Transformation of the output layer's product: z = cap tanh(m (x W^T + b) / cap), for models that cap or scale
    logits."""

    multiplier: float = 1.0
    """m: Cohere's `logit_scale`, 1 / Granite's `logits_scaling`."""

    softcap: float | None = None
    """cap: Gemma's `final_logit_softcapping`. None: no cap."""

    def apply(self, product: torch.Tensor) -> torch.Tensor:
        """Compute z in place from x W^T + b."""
        if self.multiplier != 1.0:
            product.mul_(self.multiplier)
        return product if self.softcap is None else product.div_(self.softcap).tanh_().mul_(self.softcap)


class KeptIds(NamedTuple):
    """Tokens over which the distribution of each of N tokens is normalized, instead of the vocabulary."""

    ids: torch.Tensor
    """[M], of any integer dtype."""

    starts: torch.Tensor
    """[N] int64: start of each token's ids in `ids`."""

    counts: torch.Tensor
    """[N] int64: their number; 0: the whole vocabulary."""

    def build_outside_mask(self, chunk: slice, num_words: int) -> torch.Tensor:
        """Return the vocabulary entries that are not kept for the tokens of a chunk, [C, V] bool."""
        starts, counts = self.starts[chunk], self.counts[chunk]
        rows = torch.repeat_interleave(counts)
        # The i-th kept token of the chunk is the (i - number in previous rows)-th of its row.
        shifts = starts - (counts.cumsum(0) - counts)
        ids = self.ids[torch.arange(len(rows), device=rows.device) + shifts[rows]].long()
        outside = (counts > 0)[:, None].repeat(1, num_words)
        outside[rows, ids] = False
        return outside


_EXCLUDED = -1e30
"""Logit of a token that is not kept: its probability is exactly 0, and so is its product with it, where -inf would give
NaN."""


@dataclass(frozen=True)
class _Settings:
    rule: LogitRule
    temperature: float
    chunk_size: int
    with_entropy: bool
    compile: bool


def compute_candidate_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    candidates: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    rule: LogitRule = LogitRule(),
    chunk_size: int = 1024,
    with_entropy: bool = False,
    compile: bool = False,
    kept: KeptIds | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Compute the log-prob of each label under softmax(z / temperature), z = rule(hidden W^T + b), the entropy in nats
    and, in the same pass, the log-probs of further candidate ids at each position:

        log p(label) = z_label - logsumexp(z)        H = logsumexp(z) - sum_v p_v z_v

    All are differentiable in hidden, weight and bias. The gradient of the entropy is only computed if the loss depends
    on it.

    Args:
        hidden: [N, H], any float dtype; N may be 0.
        weight, bias: [V, H] and [V]. The product is computed in the weight's dtype (or autocast's), the softmax in
            float32 (float64 for a float64 weight).
        labels: [N] int64.
        candidates: [N, K] ids, of any integer dtype; None: no further ids.
        chunk_size: C.
        compile: use torch.compile, one kernel per direction instead of many.
        kept: tokens S_n that the n-th distribution is restricted to (https://arxiv.org/abs/2512.02556): log-prob and
            entropy are computed from z / temperature over them,

                log p(label) = z_label - logsumexp_{v in S_n}(z_v)

            and no other token gets a gradient. A label outside has log-prob -1e30. None: the vocabulary.

    Returns:
        log_probs [N], entropy [N] or None, log-probs of the candidates [N, K] or None. The bits of the first do not
        depend
            on whether the others are requested.
    """
    device_type = weight.device.type
    if torch.is_autocast_enabled(device_type):
        # Autocast ends with the forward: the backward, which recomputes the logits, must compute the same ones.
        weight = weight.to(torch.get_autocast_dtype(device_type))
    settings = _Settings(rule, temperature, chunk_size, with_entropy, compile)
    return _TokenLogProbs.apply(hidden, weight, bias, labels, candidates, kept, settings)  # type: ignore[misc]


@torch.no_grad()
def compute_top_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    num_top: int,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    rule: LogitRule = LogitRule(),
    chunk_size: int = 1024,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [N, K] int64 and log-probs [N, K] of the K = `num_top` most likely tokens at each position, in
    descending order, under the distribution of `compute_candidate_log_probs`. Without gradients."""
    settings = _Settings(rule, temperature, chunk_size, with_entropy=False, compile=False)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    ids = torch.zeros(len(hidden), num_top, dtype=torch.long, device=hidden.device)
    log_probs = torch.zeros(len(hidden), num_top, dtype=dtype, device=hidden.device)
    if torch.is_autocast_enabled(weight.device.type):
        weight = weight.to(torch.get_autocast_dtype(weight.device.type))
    for chunk in _iter_chunks(len(hidden), chunk_size):
        logits = _scale_logits(multiply_transposed(hidden[chunk].to(weight.dtype), weight), bias, settings)
        log_norm = logits.logsumexp(dim=-1, keepdim=True)
        largest, ids[chunk] = logits.topk(num_top, dim=-1)
        log_probs[chunk] = largest - log_norm
    return ids, log_probs


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        candidates: torch.Tensor | None,
        kept: KeptIds | None,
        settings: _Settings,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # Only per-token numbers are saved: the backward recomputes the logits instead of storing [N, V].
        log_probs, log_norm, entropy = (torch.zeros(len(hidden), dtype=dtype, device=hidden.device) for _ in range(3))
        of_candidates = None if candidates is None else log_probs.new_zeros(candidates.shape)
        scores = _compile_function(_score_chunk) if settings.compile else _score_chunk
        for chunk in _iter_chunks(len(hidden), settings.chunk_size):
            # The product has no name, which would keep it alive during the next chunk.
            ids = None if candidates is None else candidates[chunk].long()
            outside = None if kept is None else kept.build_outside_mask(chunk, len(weight))
            log_probs[chunk], log_norm[chunk], entropy[chunk], own = scores(
                multiply_transposed(hidden[chunk].to(weight.dtype), weight), bias, labels[chunk], ids, outside, settings
            )
            if of_candidates is not None and own is not None:
                of_candidates[chunk] = own
        ctx.settings = settings
        ctx.save_for_backward(hidden, weight, bias, labels, candidates, log_norm, entropy, *(kept or ()))
        # An unused gradient stays None, and the entropy's part of the backward is skipped.
        ctx.set_materialize_grads(False)
        return log_probs, entropy if settings.with_entropy else None, of_candidates

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_log_probs: torch.Tensor | None,
        grad_entropy: torch.Tensor | None,
        grad_candidates: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels, candidates, log_norm, entropy, *of_kept = ctx.saved_tensors
        kept = KeptIds(*of_kept) if of_kept else None
        settings: _Settings = ctx.settings
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_norm)
        grad_of_product = _compile_function(_compute_chunk_gradient) if settings.compile else _compute_chunk_gradient
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # Sums over chunks are float32 for any dtype of the products: there may be hundreds of chunks.
        sum_weight = _Sum(weight, log_norm.dtype) if of_weight else None
        sum_bias = _Sum(bias, log_norm.dtype) if of_bias else None
        for chunk in _iter_chunks(len(hidden), settings.chunk_size):
            states = hidden[chunk].to(weight.dtype)
            grad_product = grad_of_product(
                multiply_transposed(states, weight),
                bias,
                labels[chunk],
                log_norm[chunk],
                entropy[chunk],
                grad_log_probs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
                None if grad_candidates is None else (candidates[chunk].long(), grad_candidates[chunk]),
                None if kept is None else kept.build_outside_mask(chunk, len(weight)),
                settings,
            )
            if sum_bias is not None:
                sum_bias.add(grad_product.sum(dim=0))
            grad_product = grad_product.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk] = multiply_transposed(grad_product, weight.t())
            if sum_weight is not None:
                sum_weight.add(multiply_transposed(grad_product.t(), states.t()))
            del grad_product  # before the next chunk is computed
        of_parameters = sum_weight and sum_weight.get_result(), sum_bias and sum_bias.get_result()
        return grad_hidden, *of_parameters, None, None, None, None


class _Sum:
    """Sum of tensors shaped like `like`, in `dtype`; the first is used directly, to save a buffer of zeros."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype):
        self.like, self.dtype = like, dtype
        self.sum: torch.Tensor | None = None

    def add(self, term: torch.Tensor) -> None:
        self.sum = term.to(self.dtype) if self.sum is None else self.sum.add_(term)

    def get_result(self) -> torch.Tensor:
        return torch.zeros_like(self.like) if self.sum is None else self.sum.to(self.like.dtype)


def _iter_chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, total)) for start in range(0, total, size))


@cache
def _compile_function(function: Callable[..., object]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _scale_logits(product: torch.Tensor, bias: torch.Tensor | None, settings: _Settings) -> torch.Tensor:
    """Compute z / temperature of a chunk, [C, V], in float32 or more, from hidden W^T, which may be overwritten."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    if bias is not None:
        logits += bias
    logits = settings.rule.apply(logits)
    return logits if settings.temperature == 1.0 else logits.div_(settings.temperature)


def _score_chunk(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    candidates: torch.Tensor | None,
    outside: torch.Tensor | None,
    settings: _Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute log_probs, logsumexp(z) and entropy of a chunk, each [C] (entropy is 0 if not requested), and the
    log-probs of its candidates [C, K], if any; all without the tokens of `outside` [C, V]."""
    logits = _scale_logits(product, bias, settings)
    if outside is not None:
        logits.masked_fill_(outside, _EXCLUDED)
    largest = logits.amax(dim=-1)
    # exp of the differences cannot overflow; `largest` is added back to the logarithm of their sum.
    logits -= largest[:, None]
    of_labels = logits.gather(1, labels[:, None])[:, 0]
    of_candidates = None if candidates is None else logits.gather(1, candidates)
    if settings.with_entropy:
        powers = logits.exp()
        total = powers.sum(dim=-1)
        entropy = total.log() - (powers.mul_(logits)).sum(dim=-1) / total
    else:
        total = logits.exp_().sum(dim=-1)
        entropy = torch.zeros_like(total)
    log_total = total.log()
    if of_candidates is not None:
        of_candidates -= log_total[:, None]
    return of_labels - log_total, log_total + largest, entropy, of_candidates


def _compute_chunk_gradient(
    product: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    log_norm: torch.Tensor,
    entropy: torch.Tensor,
    grad_log_probs: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    grad_candidates: tuple[torch.Tensor, torch.Tensor] | None,
    outside: torch.Tensor | None,
    settings: _Settings,
) -> torch.Tensor:
    """Compute the gradient [C, V] of the product hidden W^T + b, from the gradients of log-probs (g) and entropy (e),
    [C], and from ids and gradients [C, K] of candidates, which are further labels:

    d log p(label) / dz_v = [v = label] - p_v          dH / dz_v = -p_v (log p_v + H)
    """
    rule, temperature = settings.rule, settings.temperature
    log_p = _scale_logits(product, bias, settings)
    slope = rule.multiplier / temperature
    # d/dx cap tanh(x / cap) = 1 - tanh^2; `log_p` still holds the capped logits, divided by the temperature.
    slope_of_cap = None if rule.softcap is None else 1 - (log_p * (temperature / rule.softcap)).square_()
    if outside is not None:
        log_p.masked_fill_(outside, _EXCLUDED)  # p is exactly 0 there, and so is the gradient
    log_p -= log_norm[:, None]
    # Every log-prob subtracts the same normalizer: their gradients add up to one factor of -p.
    of_norm = grad_log_probs if grad_candidates is None else grad_log_probs + grad_candidates[1].sum(dim=-1)
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-of_norm[:, None])
    else:
        p = log_p.exp()
        grad = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(of_norm[:, None]).mul_(p)
    grad.scatter_add_(1, labels[:, None], grad_log_probs[:, None])
    if grad_candidates is not None:
        grad.scatter_add_(1, *grad_candidates)
    if slope != 1.0:
        grad *= slope
    return grad if slope_of_cap is None else grad.mul_(slope_of_cap)
