"""Types and helpers of row functions. Imports nothing but errors."""

from collections.abc import Callable
from typing import Any

from skyrl_gym.error import TaskError

Problem = dict[str, Any]
"""One problem, with the columns of its published set."""

Row = dict[str, Any]
"""One row of an environment."""

MakeRow = Callable[[Problem, str, int], Row | None]
"""(problem, split, index) -> row, or None to leave the problem out. Raises TaskError on a problem of another form."""


def first(problem: Problem, columns: str) -> Any:
    """Return the first of the columns "a|b|c" that holds something.

    Raises:
        TaskError: none of them does.
    """
    for name in columns.split("|"):
        if problem.get(name) is not None:
            return problem[name]
    raise TaskError(f"no column {columns.replace('|', ' or ')}; the columns are {', '.join(problem)}")


def texts(value: Any) -> list[str]:
    """Return one text or several as a list."""
    return [value] if isinstance(value, str) else [str(item) for item in value]
