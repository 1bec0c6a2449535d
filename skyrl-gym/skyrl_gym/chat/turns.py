"""Turns of a model as token ids: which of them continue a training row, and the columns of joined turns."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

TurnTokens = tuple[list[int], list[int]]
"""Whole input and output of the model in one turn, as token ids."""


def get_tokens_between(before: TurnTokens, turn: TurnTokens) -> list[int] | None:
    """Return the tokens between the outputs of two turns; None if the input of `turn` does not begin with the whole
    turn before (the history was rewritten)."""
    beginning = before[0] + before[1]
    return turn[0][len(beginning) :] if turn[0][: len(beginning)] == beginning else None


def split_appending(turns: Iterable[T], tokens_of: Callable[[T], TurnTokens]) -> list[list[T]]:
    """Split turns into runs in which the input of each turn begins with the whole turn before."""
    runs: list[list[T]] = []
    for turn in turns:
        if runs and get_tokens_between(tokens_of(runs[-1][-1]), tokens_of(turn)) is not None:
            runs[-1].append(turn)
        else:
            runs.append([turn])
    return runs


def join_column(parts: Sequence[Sequence[T]], gaps: Sequence[int], fill: T) -> list[T]:
    """Concatenate a column of several turns, with `fill` for each of the `gaps[i]` tokens after the i-th of them."""
    column = list(parts[0])
    for gap, part in zip(gaps, parts[1:], strict=True):
        column += [*[fill] * gap, *part]
    return column


def join_optional_column(parts: Sequence[Sequence[T] | None], gaps: Sequence[int], fill: T) -> list[T] | None:
    """Concatenate a column as `join_column` does; None if it is unknown for a turn."""
    known = [part for part in parts if part is not None]
    return join_column(known, gaps, fill) if len(known) == len(parts) else None
