"""Streaming reader of a JSON list: a file of one list may be larger than memory. Independent of dataset rows."""

import json
from collections.abc import Iterator
from typing import TextIO

_BLOCK = 1 << 20
"""Characters read at once."""

_LONGEST_WORD = 16
"""Characters of the longest JSON word (`-Infinity`) and of an escape: a chunk may end within them."""

_SPACE = " \t\r\n"


def iter_list_items(file: TextIO) -> Iterator[object]:
    """Yield the items of a file that holds one JSON list. At most one item and a chunk are in memory.

    Raises:
        ValueError: the file is not a JSON list; with the number of the item.
    """
    reader = _ListReader(file)
    reader.take("[")
    if reader.next_character() == "]":
        reader.take("]")
    else:
        yield reader.item()
        while reader.take(",]") == ",":
            yield reader.item()
    if rest := reader.next_character():
        raise ValueError(f"{rest!r} found after the end of the list")


class _ListReader:
    def __init__(self, file: TextIO) -> None:
        self._file, self._decoder = file, json.JSONDecoder()
        self._text, self._place, self._num_items, self._is_complete = "", 0, 0, False

    def next_character(self) -> str:
        """Return the next non-space character without consuming it; empty at the end of the file."""
        while True:
            while self._place < len(self._text) and self._text[self._place] in _SPACE:
                self._place += 1
            if self._place < len(self._text) or self._is_complete:
                return self._text[self._place : self._place + 1]
            self._read(_BLOCK)

    def take(self, expected: str) -> str:
        """Consume the next character, which must be one of these."""
        found = self.next_character()
        if not found or found not in expected:
            what = repr(found) if found else "the end of the file"
            raise ValueError(
                f"after {self._num_items} items of the list, found {what}, expected {' or '.join(expected)}"
            )
        self._place += 1
        return found

    def item(self) -> object:
        """Read the next item."""
        self.next_character()
        size = _BLOCK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _LONGEST_WORD
                if self._is_complete or not is_cut:
                    raise ValueError(f"item {self._num_items} of the list is not valid JSON: {error.msg}") from error
            else:
                # A number at the end of the chunk may continue: 1 of 1e-3.
                is_cut = isinstance(value, int | float) and not self._text[end : end + 3].strip("+-.eE")
                if not is_cut or self._is_complete:
                    self._place, self._num_items = end, self._num_items + 1
                    return value
            self._read(size)
            size *= 2  # a long item is parsed again after each chunk: all attempts take twice the time of one, not more

    def _read(self, size: int) -> None:
        read = self._file.read(size)
        self._is_complete = not read
        self._text, self._place = self._text[self._place :] + read, 0
