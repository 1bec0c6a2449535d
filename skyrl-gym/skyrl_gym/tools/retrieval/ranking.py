"""Ranked documents, and the protocol of indexes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np

Hit = tuple[int, float]
"""Number of a document, and its score; higher is better."""


class Index(Protocol):
    """Interface of an index of documents. Used by one thread at a time."""

    batch_size: int
    """Queries worth searching together."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most `topk` documents, the best first."""
        ...

    def save(self, folder: Path) -> None: ...


def best(scores_N: "np.ndarray", topk: int) -> list[Hit]:
    """Return the `topk` documents of the highest positive scores. Ties are broken by number, so answers do not vary."""
    import numpy as np

    topk = min(topk, len(scores_N))
    least = np.partition(scores_N, -topk)[-topk]
    candidates = np.flatnonzero(scores_N >= max(least, np.finfo(scores_N.dtype).tiny))
    order = np.lexsort((candidates, -scores_N[candidates]))[:topk]
    return [(int(number), float(scores_N[number])) for number in candidates[order]]
