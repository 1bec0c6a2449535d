"""Draft tokens for speculative decoding by prompt lookup, and their acceptance.

Drafts are verified by sampling: the model computes the logits after all drafts of a row in one pass, and a token is
    sampled at each position with the random number of sequential decoding. Drafts are accepted as long as they equal
    the sampled tokens; the first mismatch is replaced by the sampled token. A completion thus does not depend on its
    drafts, and a draft x is accepted with probability p(x), as in speculative sampling (Leviathan et al. 2023) with
    deterministic drafts.

Dimensions: n rows, N sampled tokens: row 0 by position, then row 1, …
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_NGRAM, MAX_NGRAM = 2, 8
"""Minimum and maximum length of the suffix that must have occurred before."""


def find_drafts(tokens: np.ndarray, num: int) -> np.ndarray:
    """Return `num` draft tokens: the tokens after the last earlier occurrence of the longest suffix of `tokens`,
    continued periodically. Empty if fewer than `MIN_NGRAM` tokens match (prompt lookup decoding, Saxena 2023).

    Args:
        tokens: [L], the prompt and the completion so far
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
class SamplingPositions:
    """Positions at which a step samples tokens: after a row's tokens, and after each of its drafts.

    Args:
        rows: [N], ascending
        offsets: [N], number of drafts before the position
    """

    rows: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_drafts(cls, drafts: Sequence[np.ndarray]) -> "SamplingPositions":
        """Build the positions of rows with these drafts."""
        sizes = np.array([len(own) + 1 for own in drafts])
        rows = np.repeat(np.arange(len(drafts)), sizes)
        return cls(rows, np.arange(len(rows)) - np.repeat(sizes.cumsum() - sizes, sizes))

    def compute_accepted(self, drafts: Sequence[np.ndarray], tokens: np.ndarray) -> np.ndarray:
        """Return [N], True at positions where all earlier drafts of the row equal the sampled tokens.

        Args:
            tokens: [N], sampled tokens
        """
        is_next = self.offsets > 0
        agrees = np.ones(len(tokens), np.bool_)
        agrees[is_next] = tokens[np.flatnonzero(is_next) - 1] == np.concatenate([tokens[:0], *drafts])
        # Positions after a row's first mismatch: the cumulative number of mismatches has grown.
        missed = (~agrees).cumsum()
        return missed == missed[np.flatnonzero(~is_next)][self.rows]
