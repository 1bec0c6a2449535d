"""Draft tokens for speculative decoding, by prompt lookup, and which of them an answer keeps.

Drafts are verified by drawing: the model computes the logits behind all drafts of a row in one pass, and a token is
drawn at each place with the random number that decoding one by one would use there. Drafts are kept as long as they are
the tokens drawn, and the first that is not gives way to the token drawn. So an answer does not depend on its drafts,
and a draft x is accepted with probability p(x), as in speculative sampling (Leviathan et al. 2023) with drafts that
are certain.

Dimensions: n rows, N tokens drawn: those of row 0 by position, then those of row 1, …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_NGRAM, MAX_NGRAM = 2, 8
"""Tokens at the end of an answer that must have stood before for a draft, and those that are compared at most."""


def find_drafts(tokens: np.ndarray, num: int) -> np.ndarray:
    """Return `num` draft tokens: what followed the longest suffix of `tokens` where it stood last, from there on
    periodic. None at all if fewer than `MIN_NGRAM` tokens stood before (prompt lookup decoding, Saxena 2023).

    Args:
        tokens: [L], the prompt and the answer so far
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    size = min(1, len(ends))
    while size and size < MAX_NGRAM:
        longer = ends[ends >= size]
        longer = longer[tokens[longer - size] == tokens[-1 - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    if size < MIN_NGRAM or num < 1:
        return tokens[:0]
    return np.resize(tokens[ends[-1] + 1 :][:num], num)


@dataclass(frozen=True)
class Places:
    """Places at which tokens are drawn at one step: behind a row's tokens, and behind each of its drafts.

    Args:
        rows: [N], ascending
        offsets: [N], number of drafts before the place
    """

    rows: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_drafts(cls, drafts: Sequence[np.ndarray]) -> "Places":
        """Return the places of rows with these drafts."""
        sizes = np.array([len(own) + 1 for own in drafts])
        rows = np.repeat(np.arange(len(drafts)), sizes)
        return cls(rows, np.arange(len(rows)) - np.repeat(sizes.cumsum() - sizes, sizes))

    def compute_accepted(self, drafts: Sequence[np.ndarray], tokens: np.ndarray) -> np.ndarray:
        """Return [N] True at places before which all drafts of the row are the tokens drawn.

        Args:
            tokens: [N], those drawn
        """
        is_next = self.offsets > 0
        agrees = np.ones(len(tokens), np.bool_)
        agrees[is_next] = tokens[np.flatnonzero(is_next) - 1] == np.concatenate([tokens[:0], *drafts])
        # Of a row, places behind its first disagreement: those whose running number of disagreements has grown.
        missed = (~agrees).cumsum()
        return missed == missed[np.flatnonzero(~is_next)][self.rows]
