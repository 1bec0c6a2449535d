"""Hints for misspelt names, one home for all packages. Imports no other module of this repository."""

import difflib
from collections.abc import Iterable


def did_you_mean(
    name: object, known: Iterable[str], *, otherwise: str | None = None, prefix: str = "", count: int = 1
) -> str:
    """Return the end of an error about an unknown name: `did you mean NEAREST?`, else `known are A, B`.

    Args:
        known: valid names.
        otherwise: text where no name is near, instead of the list of valid names.
        prefix: section of the names, put before a suggestion.
        count: largest number of suggestions.
    """
    names = list(known)
    if nearest := difflib.get_close_matches(str(name), names, n=count, cutoff=0.5):
        return f"did you mean {' or '.join(prefix + near for near in nearest)}?"
    return otherwise or f"known are {', '.join(names) or 'none'}"
