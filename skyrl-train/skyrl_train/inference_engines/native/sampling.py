"""Sampling of tokens from logits: temperature, penalties, truncation, one uniform number per token. Pure functions.

Dimensions: B rows, V vocabulary, P tokens of a row so far, S stop tokens of a row.

A request's randomness is a counter, not a state: the uniform for the token at position p of the sequence (prompt
included) depends on (seed, index, p) alone. The numbers do not depend on other requests, and a request aborted after k
tokens continues exactly when it is sent again with these k tokens after its prompt.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

_CDF_BLOCK = 256
_PART = 2**19
"""Approximate number of logits sampled together on a CPU. Parts reuse the same memory: allocating memory for all rows
of a large vocabulary takes longer than the computation.
"""
_ONE_MINUS = 1 - 1e-15  # largest fraction of the total mass that a uniform may select


def _mix_bits(values: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection with independent-looking output
    bits.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def compute_random_key(seed: int, index: int) -> np.uint64:
    """Compute the 64-bit key of a request's random numbers."""
    words = np.array([seed % 2**64, index % 2**64], dtype=np.uint64)
    return _mix_bits(_mix_bits(words[:1] + _GOLDEN) ^ (words[1:] * _GOLDEN + _GOLDEN))[0]


def compute_uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Compute numbers [B] in [0, 1), one for each key (uint64) at its position."""
    return (_mix_bits(_mix_bits(keys + positions.astype(np.uint64) * _GOLDEN)) >> np.uint64(11)) * 2.0**-53


@dataclass(kw_only=True)
class SamplingBatch:
    """Sampling settings of B rows as tensors; None if no row uses a setting, so that it costs nothing."""

    temperature: torch.Tensor
    """[B], 0 is greedy."""
    all_greedy: bool
    any_greedy: bool
    top_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    """V where off."""
    min_p: torch.Tensor | None = None
    truncated: torch.Tensor | None = None
    """Rows of `top_p`, `top_k` and `min_p`, so that the others cost nothing; None: all B."""
    repetition_penalty: torch.Tensor | None = None
    recorded: torch.Tensor | None = None
    """Rows that return kept tokens and log-probs over them; None: no row."""

    def select_rows(self, rows: torch.Tensor) -> "SamplingBatch":
        """Select the settings of these rows [N], ascending; a row may occur several times."""
        own, truncated, recorded = rows, None, None
        if self.truncated is not None:
            truncated = torch.isin(rows, self.truncated).nonzero()[:, 0]
            own = torch.searchsorted(self.truncated, rows[truncated])
        if self.recorded is not None:
            recorded = torch.isin(rows, self.recorded).nonzero()[:, 0]

        def of(column: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
            return None if column is None else column[rows]

        return replace(
            self,
            temperature=self.temperature[rows],
            top_p=of(self.top_p, own),
            top_k=of(self.top_k, own),
            min_p=of(self.min_p, own),
            truncated=truncated,
            repetition_penalty=of(self.repetition_penalty, rows),
            recorded=recorded,
        )


class Draw(NamedTuple):
    """Sampled tokens of B rows in one step."""

    tokens: torch.Tensor
    """[B]"""
    log_probs: torch.Tensor
    """[B]"""
    kept: torch.Tensor | None
    """[recorded rows, V] bool, the tokens with nonzero probability; None: no row is recorded."""
    top_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None
    """[B, K], the most likely tokens of the distribution of `log_probs`; None: not requested."""


class Biases(NamedTuple):
    """Values to add to logits at [N] pairs of row and token."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


def apply_repetition_penalty(logits: torch.Tensor, tokens: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divide the positive and multiply the negative logits of tokens the row already holds (Keskar et al. 2019).

    Args:
        logits: [B, V]
        tokens: [B, P], prompt and completion; padded with any token of the row
        penalty: [B], 1 is off
    """
    seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(1, tokens, True)
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def truncate(probabilities: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Zero the probabilities excluded by min-p, top-k and top-p, in this order, without renormalization. Rows must
    match the settings of `batch`: all, or the `truncated` ones.

    min-p drops tokens below min_p times the maximum; top-k keeps the k most likely (and ties with the k-th); top-p
    keeps the smallest set of most likely tokens with at least fraction top_p of the remaining mass.

    Args:
        probabilities: [B, V]
    """
    if batch.min_p is not None:
        floor = probabilities.amax(-1, keepdim=True) * batch.min_p[:, None]
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
    if batch.top_k is None and batch.top_p is None:
        return probabilities
    ordered = probabilities.sort(dim=-1, descending=True).values
    if batch.top_k is not None:
        floor = ordered.gather(1, batch.top_k[:, None] - 1)
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
        ordered = ordered.masked_fill(ordered < floor, 0)
    if batch.top_p is not None:
        before = ordered.double().cumsum(-1) - ordered  # mass of more likely tokens
        kept = before < batch.top_p[:, None] * ordered.double().sum(-1, keepdim=True)
        floor = ordered.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
    return probabilities


def sample_by_inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample the token at which the cumulative sum of `weights` first exceeds `uniform` times their total.

    Sums over blocks, then within one block: one pass over the vocabulary, and double precision where needed.

    Args:
        weights: [B, V], not negative, not necessarily summing to 1
        uniform: [B], float64 in [0, 1)
    Returns: [B]; never a token of weight zero
    """
    batch, vocabulary = weights.shape
    padding = -vocabulary % _CDF_BLOCK
    blocks = torch.nn.functional.pad(weights, (0, padding)).view(batch, -1, _CDF_BLOCK)
    block_ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = (uniform.clamp(max=_ONE_MINUS) * block_ends[:, -1])[:, None]
    block = torch.searchsorted(block_ends, target, right=True).clamp_(max=blocks.shape[1] - 1)
    start = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, _CDF_BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    rest = torch.minimum((target - start).clamp_(min=0), within[:, -1:] * _ONE_MINUS)
    token = block * _CDF_BLOCK + torch.searchsorted(within, rest, right=True)
    return token[:, 0].clamp_(max=vocabulary - 1)


def sample(
    logits: torch.Tensor,
    batch: SamplingBatch,
    uniform: torch.Tensor | None,
    *,
    tokens: torch.Tensor | None = None,
    biases: Biases | None = None,
    forbidden: torch.Tensor | None = None,
    num_top: int = 0,
) -> Draw:
    """Sample one token per row, with its log-prob.

    Args:
        logits: [B, V], float32
        uniform: [B], float64; not needed if every row is greedy
        tokens: [B, P], for repetition penalties; required if a row has one
        biases: added after repetition penalties, before the temperature
        forbidden: [B, V], True at tokens that must not be sampled
        num_top: K
    Returns:
        tokens [B], and log softmax(logits / temperature) at them (temperature 1 where greedy), taken before penalties,
        biases, truncation and `forbidden`. For recorded rows (never greedy): the sampling distribution over the kept
        tokens.
    """
    rows_of_part = max(1, _PART // logits.shape[1])
    is_plain = tokens is None and biases is None and forbidden is None and batch.recorded is None and not num_top
    if is_plain and rows_of_part < len(logits) and logits.device.type == "cpu":
        return _sample_in_parts(logits, batch, uniform, rows_of_part)
    divisor = torch.where(batch.temperature > 0, batch.temperature, 1.0) if batch.any_greedy else batch.temperature
    log_probs = (logits / divisor[:, None]).log_softmax(-1)
    adjusted = logits
    if batch.repetition_penalty is not None:
        assert tokens is not None
        adjusted = apply_repetition_penalty(adjusted, tokens, batch.repetition_penalty)
    if biases is not None:
        adjusted = adjusted.index_put((biases.rows, biases.tokens), biases.values, accumulate=True)
    if forbidden is not None:
        adjusted = adjusted.masked_fill(forbidden, -math.inf)
    chosen = adjusted.argmax(-1) if batch.any_greedy else None
    kept = None
    if not batch.all_greedy:
        assert uniform is not None
        probabilities = log_probs.exp() if adjusted is logits else (adjusted / divisor[:, None]).softmax(-1)
        if batch.truncated is None:
            probabilities = truncate(probabilities, batch)
        else:
            probabilities[batch.truncated] = truncate(probabilities[batch.truncated], batch)
        kept = None if batch.recorded is None else probabilities[batch.recorded] > 0
        drawn = sample_by_inverse_cdf(probabilities, uniform)
        chosen = drawn if chosen is None else torch.where(batch.temperature > 0, drawn, chosen)
    assert chosen is not None
    of_chosen = log_probs.gather(1, chosen[:, None])[:, 0]
    if kept is not None:
        rows = batch.recorded
        # Normalized over kept logits like in the trainer: a quotient of probabilities would round differently.
        own = (adjusted[rows] / divisor[rows, None]).masked_fill_(~kept, -math.inf).log_softmax(-1)
        of_chosen[rows] = own.gather(1, chosen[rows, None])[:, 0]
    if not num_top:
        return Draw(chosen, of_chosen, kept)
    top = log_probs.topk(min(num_top, log_probs.shape[-1]), dim=-1)
    return Draw(chosen, of_chosen, kept, top.indices, top.values)


def _sample_in_parts(logits: torch.Tensor, batch: SamplingBatch, uniform: torch.Tensor | None, rows: int) -> Draw:
    """Sample in chunks of rows with tensors that fit the processor's cache."""
    draws = [
        sample(logits[part], batch.select_rows(part), None if uniform is None else uniform[part])
        for part in torch.arange(len(logits)).split(rows)
    ]
    return Draw(torch.cat([draw.tokens for draw in draws]), torch.cat([draw.log_probs for draw in draws]), None)
