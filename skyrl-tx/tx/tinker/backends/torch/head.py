"""Log-probs of targets from a model's last hidden states, with its adapter on the output layer; forward and backward.

Logits are computed per chunk of one model's tokens, freed, and recomputed in the backward unless one chunk holds all
tokens. So memory is bounded by a chunk, whatever the number of tokens.

Shapes: n rows of hidden states (of `layout.BLOCK` each), C rows of a chunk, V words, M targets, r rank.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from skyrl_train.models.token_log_probs import LogitRule
from tx.tinker.backends.torch.adapters import FrozenProduct, add_gradient
from tx.tinker.backends.torch.parts import Part
from tx.tinker.types import Datum


class Targets(NamedTuple):
    """Target tokens and their rows, in the order of rows."""

    rows: np.ndarray
    """[M]"""
    words: np.ndarray
    """[M]"""

    @classmethod
    def of(cls, data: list[Datum]) -> "Targets":
        """Collect the targets of data. A row may have several ([N, K])."""
        words = [datum.inputs["target_tokens"] for datum in data]
        starts = np.cumsum([0] + [len(datum.tokens) for datum in data])
        rows = [
            np.repeat(np.arange(start, start + len(each)), each.size // len(each))
            for start, each in zip(starts[:-1], words, strict=True)
        ]
        return cls(np.concatenate(rows), np.concatenate([each.reshape(-1) for each in words]))


class _Chunk(NamedTuple):
    rows: slice
    targets: slice
    at: torch.Tensor
    """Row in the chunk of each of its targets."""
    words: torch.Tensor


class Head:
    """The base model's output layer: z = rule(h W^T + b + adapter).

    Args:
        chunk_size: C
    """

    def __init__(self, product: FrozenProduct, rule: LogitRule, chunk_size: int):
        self.product, self.rule, self.chunk_size = product, rule, chunk_size

    def score(self, hidden: torch.Tensor, targets: Targets, part: Part | None) -> "Scored":
        """Log-probs under softmax(z).

        Args:
            hidden: [n, H], without a history for autograd.
            part: the model's adapter on this layer, if it has one.
        """
        return Scored(self, hidden, targets, part)


class Scored:
    """A model's log-probs, and what their backward needs."""

    def __init__(self, head: Head, hidden: torch.Tensor, targets: Targets, part: Part | None):
        self._head, self._hidden, self._part = head, hidden, part
        self._chunks = list(_iter_chunks(len(hidden), head.chunk_size, targets, hidden.device))
        self._low = None if part is None else torch.mm(hidden, part.matrices.a.t()).mul_(part.scaling)
        self._kept: torch.Tensor | None = None
        self._norms: list[torch.Tensor] = []
        self.log_probs = torch.empty(len(targets.rows), device=hidden.device)
        """[M] float32"""
        for chunk in self._chunks:
            logits = self._compute_logits(chunk)
            # The largest logit of each row [C, 1] is subtracted so that exp() cannot overflow; `norm` adds it again.
            largest = logits.amax(dim=-1, keepdim=True)
            logits.sub_(largest)
            # Read before exp_() below overwrites the logits: a second [C, V] tensor would double the peak memory.
            of_targets = logits[chunk.at, chunk.words]
            total = logits.exp_().sum(dim=-1, keepdim=True)
            log_total = total.log()
            self.log_probs[chunk.targets] = of_targets - log_total[chunk.at, 0]
            self._norms.append(log_total.add_(largest))
            # Several chunks are computed again in backward, since all of [n, V] may not fit. A soft cap needs the
            # logits themselves for its slope, not the probabilities.
            if len(self._chunks) == 1 and head.rule.softcap is None:
                self._kept = logits.div_(total)
            del logits  # before the next chunk's are made

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Compute the gradient of the hidden states [n, H] from the gradient of the log-probs [M]; add the adapter's to
        `part.gradient`. May be called once:

            d log p(target) / dz_v = [v = target] - p_v
        """
        answer = torch.empty_like(self._hidden)
        for chunk, norm in zip(self._chunks, self._norms, strict=True):
            dz = self._compute_logits_gradient(chunk, norm, gradient[chunk.targets]).to(self._hidden.dtype)
            dx = self._head.product.backward(dz)
            if self._part is not None:
                assert self._low is not None
                add_gradient(self._part, self._hidden[chunk.rows], self._low[chunk.rows], dz, dx)
            answer[chunk.rows] = dx
            del dz
        return answer

    def _compute_logits_gradient(self, chunk: _Chunk, norm: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """[C, V] float32, with respect to h W^T + b + adapter."""
        rule, slope = self._head.rule, None
        if self._kept is not None:
            p, self._kept = self._kept, None
        else:
            p = self._compute_logits(chunk)
            # d/dz of c tanh(z / c) is 1 - tanh^2, taken from the capped logits before they are overwritten.
            slope = None if rule.softcap is None else 1 - (p / rule.softcap).square_()
            p.sub_(norm).exp_()
        # A row may have several targets, so both terms add up the gradients of its targets.
        of_rows = gradient.new_zeros(len(p)).index_add_(0, chunk.at, gradient)
        dz = p.mul_(-of_rows[:, None]).index_put_((chunk.at, chunk.words), gradient, accumulate=True)
        if rule.multiplier != 1.0:
            dz.mul_(rule.multiplier)
        return dz if slope is None else dz.mul_(slope)

    def _compute_logits(self, chunk: _Chunk) -> torch.Tensor:
        """[C, V] float32"""
        product = self._head.product.forward(self._hidden[chunk.rows])
        if self._part is not None:
            assert self._low is not None
            product.addmm_(self._low[chunk.rows], self._part.matrices.b)
        return self._head.rule.apply(product.float())


def _iter_chunks(num_rows: int, size: int, targets: Targets, device: torch.device) -> Iterator[_Chunk]:
    for start in range(0, num_rows, size):
        end = min(start + size, num_rows)
        first, last = np.searchsorted(targets.rows, (start, end))
        at = torch.from_numpy(targets.rows[first:last] - start).to(device)
        words = torch.from_numpy(targets.words[first:last].astype(np.int64)).to(device)
        yield _Chunk(slice(start, end), slice(int(first), int(last)), at, words)
