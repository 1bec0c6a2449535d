"""Rows as text, the way a pandas frame prints without its index: what models that use SQL have learned to read.

Written out here so that a table of ten rows does not need pandas. A test compares the two.
"""

import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

EMPTY = "Empty DataFrame\nColumns: []\nIndex: []"

DIGITS = 6
"""Number of digits shown after the decimal point of a float."""

_DECIMAL = re.compile(r"[+-]?[0-9]+\.[0-9]*")
_ESCAPES = str.maketrans({"\t": r"\t", "\n": r"\n", "\r": r"\r"})


class Frame:
    """A table with the column names 0, 1, 2, ... and right-aligned cells.

    Lines are rendered lazily: a few rows can be a gigabyte once every cell is padded to the widest.
    """

    def __init__(self, rows: Sequence[Sequence[object]], cell_characters: int | None = None):
        self._columns = [
            _format_column(str(index), values, cell_characters) for index, values in enumerate(zip(*rows, strict=True))
        ]
        self._widths = [max(map(len, cells)) for cells in self._columns]
        self.num_lines = len(rows) + 1

    def __len__(self) -> int:
        """Characters of the whole text."""
        if not self._columns:
            return len(EMPTY)
        return self.num_lines * (sum(self._widths) + len(self._widths)) - 1

    def render(self, num_characters: int | None = None) -> str:
        """Return the text, or its beginning."""
        if not self._columns:
            return EMPTY[:num_characters]
        line_length = sum(self._widths) + len(self._widths)
        wanted = None if num_characters is None else num_characters // line_length + 1
        lines = (
            " ".join(cell.rjust(width) for cell, width in zip(line, self._widths, strict=True))
            for line in zip(*self._columns, strict=True)
        )
        return "\n".join(islice(lines, wanted))[:num_characters]


def _format_column(label: str, values: Sequence[Any], cell_characters: int | None) -> list[str]:
    """Format a column's header and cells by the type of all its values: whole numbers, numbers, text, or anything."""
    types = {type(value) for value in values}
    if types == {int}:
        return [f" {label}", *map(str, values)]
    if types <= {int, float, type(None)} and types != {type(None)}:
        return [f" {label}", *_format_floats(values)]
    null = "NaN" if types == {str, type(None)} else "None"
    return [label, *(_format_cell(value, null)[:cell_characters] for value in values)]


def _format_cell(value: object, null: str) -> str:
    match value:
        case None:
            return null
        case float():
            return _strip_zeros([f"{value: .{DIGITS}f}"])[0]
        case _:
            return str(value).translate(_ESCAPES)


def _format_floats(values: Sequence[float | None]) -> list[str]:
    """Format all with as many decimals as the one that needs most; in scientific notation if that distorts one."""
    numbers = [abs(value) for value in values if value is not None]
    fixed = _strip_zeros([_format_number(value, "f") for value in values])
    too_long = max(map(len, fixed)) > DIGITS + 6
    has_small = any(0 < number < 10**-DIGITS for number in numbers)
    has_large = any(number > 1e6 for number in numbers)
    return (
        _strip_zeros([_format_number(value, "e") for value in values])
        if has_small or (too_long and has_large)
        else fixed
    )


def _format_number(value: float | None, notation: str) -> str:
    return "NaN" if value is None else f"{float(value):.{DIGITS}{notation}}"


def _strip_zeros(texts: list[str]) -> list[str]:
    """Strip the zeros that all decimals end in, but for one."""
    decimals = {text for text in texts if _DECIMAL.fullmatch(text.strip())}
    surplus = min((len(text) - len(text.rstrip("0")) for text in decimals), default=0)
    surplus -= any(text[: len(text) - surplus].endswith(".") for text in decimals)
    return [text[: len(text) - surplus] if text in decimals else text for text in texts] if surplus > 0 else texts
