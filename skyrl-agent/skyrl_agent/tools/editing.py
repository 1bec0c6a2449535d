"""Text edits that preserve the rest of the text, including line ends. Errors are returned to the model.

A line ends with `\\n`; a preceding `\\r` belongs to the line end.
"""

import difflib
import re

NEAR_LINES = 3
NEAR_CUTOFF = 0.6
COMPARED_CHARS = 200
MAX_LISTED_LINES = 20
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NEWLINE = r"(?:\r\n|(?<!\r)\n)"


def split_lines(text: str) -> list[str]:
    """Split a text into lines with their ends."""
    return _LINE.findall(text)


def get_line_end(text: str) -> str:
    """Return the most frequent line end."""
    windows = text.count("\r\n")
    return "\r\n" if 2 * windows > text.count("\n") else "\n"


def replace_once(text: str, old: str, new: str) -> tuple[str, int]:
    """Replace the only occurrence of `old` by `new`. Returns the text and the line of the replacement. Line ends in
    `old` match either kind in the text; `new` gets the line ends of the replaced text.

    Raises:
        ValueError: `old` is empty, equal to `new`, missing, or occurs more than once.
    """
    old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if not old:
        raise ValueError("old_str is empty: to add text, use the command insert")
    if old == new:
        raise ValueError("old_str and new_str are the same: nothing would change")
    pattern = re.compile(f"(?=({_NEWLINE.join(map(re.escape, old.split(chr(10))))}))")
    spans = [found.span(1) for found in pattern.finditer(text)]
    if not spans:
        raise ValueError(f"old_str is not in the file, so nothing was changed. {_find_nearest(text, old)}")
    if len(spans) > 1:
        numbers = [_count_line(text, start) for start, _ in spans]
        listed = ", ".join(map(str, numbers[:MAX_LISTED_LINES])) + (", ..." if len(numbers) > MAX_LISTED_LINES else "")
        raise ValueError(
            f"old_str is in the file {len(spans)} times, beginning on the lines {listed}, so nothing was changed. "
            f"Give more of the lines around it, so that it is there once."
        )
    start, end = spans[0]
    replaced = text[start:end]
    newline = get_line_end(replaced if "\n" in replaced else text)
    return text[:start] + new.replace("\n", newline) + text[end:], _count_line(text, start)


def insert_after(text: str, line: int, inserted: str) -> str:
    """Insert lines after a line number; 0 inserts before the first line. A last line without a line end keeps none.

    Raises:
        ValueError: the line does not exist.
    """
    lines = split_lines(text)
    if not 0 <= line <= len(lines):
        raise ValueError(f"insert_line must be from 0 (before the first line) to {len(lines)}; got {line}")
    newline = get_line_end(text)
    block = [part + newline for part in inserted.replace("\r\n", "\n").removesuffix("\n").split("\n")]
    if line == len(lines) > 0 and not lines[-1].endswith("\n"):
        lines[-1] += newline
        block[-1] = block[-1].removesuffix(newline)
    return "".join([*lines[:line], *block, *lines[line:]])


def _count_line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _find_nearest(text: str, old: str) -> str:
    """Find the text the model may have meant: equal except for white space, else lines similar to the first one."""
    lines = [line.rstrip("\r\n") for line in split_lines(text)]
    wanted = old.strip("\n").split("\n")
    bare, bare_wanted = [line.strip() for line in lines], [line.strip() for line in wanted]
    if any(bare_wanted):
        for start in range(len(lines) - len(wanted) + 1):
            if bare[start] == bare_wanted[0] and bare[start : start + len(wanted)] == bare_wanted:
                same = "\n".join(lines[start : start + len(wanted)])
                return f"From line {start + 1} on it is there with other white space:\n{same}"
    first = next((line for line in wanted if line.strip()), "")[:COMPARED_CHARS]
    known = {line[:COMPARED_CHARS]: number for number, line in reversed(list(enumerate(lines, 1)))}
    near = difflib.get_close_matches(first, known, n=NEAR_LINES, cutoff=NEAR_CUTOFF)
    if not near:
        return "No line resembles it: view the file first."
    return "Lines that resemble it:\n" + "\n".join(f"{known[line]:6}\t{line}" for line in near)
