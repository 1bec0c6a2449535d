"""Incremental reading of files of JSON lines that another process appends to, replaces or leaves torn.

Lines are addressed by number through their byte offsets, so that one of a million is read without the others.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from threading import Lock
from typing import BinaryIO, Generic, TypeVar

from skyrl_inspect.dashboard.runs_folder import FileState
from skyrl_train.types import JsonObject

T = TypeVar("T")

CHUNK = 1 << 22
"""Bytes that are read at once."""

MAX_LINE = 64 << 20
"""Longest line that is read, in bytes: Python's objects take some five times as much."""


def parse(line: bytes) -> JsonObject | None:
    """Return the object that a line holds, or None. Bytes that are not UTF-8 become replacement characters."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class LineOffsets:
    """Offsets of the complete lines of a file. Grows with the file, and restarts when the file is replaced.

    Args:
        is_compressed: the file is written once, and its size differs from the size of its content.
    """

    def __init__(self, is_compressed: bool = False) -> None:
        self._is_compressed = is_compressed
        self._starts = array("q", [0])  # of each complete line, and the end of the last one
        self._scanned = 0
        self._inode = 0

    def __len__(self) -> int:
        return len(self._starts) - 1

    def update(self, file: BinaryIO, state: FileState) -> None:
        """Scan the part of the file that is new."""
        if self._is_compressed:
            if state.inode == self._inode:
                return
            self._inode = 0  # until all of it was read: it may be damaged
        if state.inode != self._inode or state.size < self._scanned:
            self._starts, self._scanned = array("q", [0]), 0
        file.seek(self._scanned)
        while chunk := file.read(CHUNK):
            found = chunk.find(b"\n")
            while found >= 0:
                self._starts.append(self._scanned + found + 1)
                found = chunk.find(b"\n", found + 1)
            self._scanned += len(chunk)
        self._inode = state.inode

    def span(self, number: int) -> tuple[int, int]:
        """Return offset and length of a line, counted from 0, without its line feed."""
        return self._starts[number], self._starts[number + 1] - self._starts[number] - 1

    @property
    def end(self) -> int:
        """Offset after the last complete line."""
        return self._starts[-1]


def read_lines(file: BinaryIO, start: int = 0) -> Iterator[bytes]:
    """Yield the complete lines from an offset on, at most `MAX_LINE` bytes of each."""
    file.seek(start)
    while line := file.readline(MAX_LINE):
        if line.endswith(b"\n"):
            yield line
        elif len(line) == MAX_LINE:
            yield line
            while (rest := file.readline(CHUNK)) and not rest.endswith(b"\n"):
                pass


def sample_rows(file: BinaryIO, size: int, count: int, max_line: int = 1 << 20) -> Iterator[JsonObject]:
    """Yield about `count` rows at even distances in bytes, the first and the last complete one among them.

    The cost does not depend on the length of the file.
    """
    seen = -1
    for index in range(count):
        target = size * index // count
        file.seek(max(0, target - 1))
        if target:
            file.readline(max_line)  # the rest of a line that began before
        yield from _read_row_after(file, file.tell(), seen, max_line)
        seen = max(seen, file.tell())
    # The last complete line ends at the last line feed.
    back = min(size, max_line)
    file.seek(size - back)
    tail = file.read(back)
    last = tail.rfind(b"\n")
    start = tail.rfind(b"\n", 0, max(0, last)) + 1
    if last > 0 and size - back + last + 1 > seen and (row := parse(tail[start:last])) is not None:
        yield row


def _read_row_after(file: BinaryIO, offset: int, seen: int, max_line: int) -> Iterator[JsonObject]:
    if offset < seen:
        return
    line = file.readline(max_line)
    if line.endswith(b"\n") and (row := parse(line)) is not None:
        yield row


class Cache(Generic[T]):
    """The values used last, by key. Several threads may ask at once; one of them makes a value."""

    def __init__(self, max_entries: int):
        self._max_entries = max_entries
        self._values: OrderedDict[object, T] = OrderedDict()
        self._lock = Lock()

    def get(self, key: object, make: Callable[[], T]) -> T:
        # One lock over making, too: two requests for a step of 100 MB must not hold it twice.
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
            self._values.move_to_end(key)
            while len(self._values) > self._max_entries:
                self._values.popitem(last=False)
            return self._values[key]
