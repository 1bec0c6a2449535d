"""Comparison of a program's output with the expected one."""

import json
from decimal import Decimal, InvalidOperation


def is_same_output(printed: str, expected: str) -> bool:
    """Line by line: equal once stripped, or the same row of numbers (`1.0 2` and `1 2.00`).

    Blank lines at the start and end do not count; there are as many lines in one as in the other.
    """
    printed_lines, expected_lines = printed.strip().split("\n"), expected.strip().split("\n")
    return len(printed_lines) == len(expected_lines) and all(
        map(_is_same_line, map(str.strip, printed_lines), map(str.strip, expected_lines))
    )


def _is_same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    printed_words, expected_words = printed.split(), expected.split()
    if len(printed_words) != len(expected_words):
        return False
    try:
        return [Decimal(word) for word in printed_words] == [Decimal(word) for word in expected_words]
    except InvalidOperation:  # not numbers; or a signalling NaN, which equals nothing
        return False


def is_same_json(returned: str, expected: str) -> bool:
    """Return whether two JSON texts have equal values (1 equals 1.0). Invalid or too deeply nested JSON equals none."""
    try:
        # As decimals, since Python reads no integers of more than 4,300 digits. 1 still equals 1.0 and true.
        values = (json.loads(text, parse_int=Decimal) for text in (returned, expected))
        return next(values) == next(values)
    except (ValueError, RecursionError):
        return False
