"""Kept tokens: for each response token, the tokens that top-p, top-k and min-p left in the vocabulary when it was
sampled (its sampling mask), passed from the rollout engine to the forward that renormalizes over them. Independent of
models.

Shapes: R tokens of a response, M kept tokens in total; B rows of a batch.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """Kept tokens of a response, ragged: the kept tokens of its first token, then of its second, and so on."""

    counts: np.ndarray
    """[R] int32, the number of each token's kept tokens; 0: the whole vocabulary, as of a token that was not drawn."""

    ids: np.ndarray
    """[M] int32, token ids."""

    def __len__(self) -> int:
        return len(self.counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeptTokens):
            return False
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.ids, other.ids)

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    @classmethod
    def of(cls, sets: Sequence[np.ndarray]) -> "KeptTokens":
        """Create the kept tokens of a response from one array of ids per token."""
        counts = np.fromiter(map(len, sets), np.int32, len(sets))
        return cls(counts, np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int32, copy=False))

    @classmethod
    def full_vocabulary(cls, length: int) -> "KeptTokens":
        """Create the kept tokens of tokens that were not sampled or whose sampling mask is unknown."""
        return cls(np.zeros(length, np.int32), np.zeros(0, np.int32))

    def first(self, length: int) -> "KeptTokens":
        """Return the kept tokens of the first tokens."""
        return KeptTokens(self.counts[:length], self.ids[: int(self.counts[:length].sum())])

    def first_without(self, token_ids: Sequence[int]) -> int | None:
        """Return the position of the first token outside its kept tokens; None if all tokens are kept.

        Args:
            token_ids: the R tokens of the response.
        """
        places = np.repeat(np.arange(len(self)), self.counts)
        found = np.zeros(len(self), bool)
        found[places[self.ids == np.asarray(token_ids)[places]]] = True
        missing = np.flatnonzero((self.counts > 0) & ~found)
        return int(missing[0]) if len(missing) else None

    @classmethod
    def from_json(cls, value: Any) -> "KeptTokens":
        """Restore kept tokens from `to_json`. Raises ValueError for any other value."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict) or set(value) != {"counts", "ids"}:
            raise ValueError("kept tokens must be an object with counts and ids")
        counts, ids = (np.frombuffer(base64.b64decode(value[name]), np.int32) for name in ("counts", "ids"))
        return cls(counts, ids)

    def to_json(self) -> dict[str, str]:
        """Return the kept tokens as JSON values."""
        columns = {"counts": self.counts, "ids": self.ids}
        return {name: base64.b64encode(column.astype(np.int32).tobytes()).decode() for name, column in columns.items()}

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> Any:
        """Serialize with `to_json` and `from_json` in pydantic, which writes the journal of rollouts."""
        from pydantic_core import core_schema

        write = core_schema.plain_serializer_function_ser_schema(cls.to_json, when_used="json")
        return core_schema.no_info_plain_validator_function(cls.from_json, serialization=write)


def join_kept_tokens(parts: Sequence[KeptTokens]) -> KeptTokens:
    """Concatenate the kept tokens of the parts of a response."""
    if len(parts) == 1:
        return parts[0]
    empty = KeptTokens.full_vocabulary(0)
    return KeptTokens(
        np.concatenate([each.counts for each in (empty, *parts)]),
        np.concatenate([each.ids for each in (empty, *parts)]),
    )


def pad_kept_tokens(rows: Sequence[KeptTokens | None], num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kept tokens of a batch: counts [B, R] int32, and ids [B, M] int32 with the concatenated kept tokens of
    each row, padded with 0.

    Args:
        rows: kept tokens of each response; None: unknown for all its tokens.
        num_columns: R.
    """
    longest = max((0 if row is None else len(row.ids) for row in rows), default=0)
    counts, ids = np.zeros((len(rows), num_columns), np.int32), np.zeros((len(rows), longest), np.int32)
    for index, row in enumerate(rows):
        if row is not None:
            counts[index, : len(row)] = row.counts
            ids[index, : len(row.ids)] = row.ids
    return torch.from_numpy(counts), torch.from_numpy(ids)
