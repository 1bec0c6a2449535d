"""What a repository defines, kept in step with its files: only those that changed are read again."""

from __future__ import annotations

import marshal
import os
import sys
import time

from .outline import Call, Entity, Import, outline
from .source import PYTHON, read_text, walk

FORMAT = 1
SETTLED_NS = 100_000_000
"""A file written less than this before it was read may be written again without its time changing."""


class SourceFile:
    """A Python file. What it imports and calls is unpacked when it is first asked for."""

    def __init__(self, path: str, stamp: tuple, text: str, error: str, entities: list, edges: bytes):
        self.path, self.stamp, self.text, self.error, self.entities = path, stamp, text, error, entities
        self._edges = edges
        self._unpacked: tuple = ()

    @classmethod
    def read(cls, path: str, stamp: tuple, text: str) -> SourceFile:
        found = outline(text)
        edges = marshal.dumps((list(map(tuple, found.imports)), list(map(tuple, found.calls))))
        return cls(path, stamp, text, found.error, found.entities, edges)

    @property
    def imports(self) -> list:
        return self._both()[0]

    @property
    def calls(self) -> list:
        return self._both()[1]

    @property
    def lines(self) -> list:
        return self.text.split("\n")

    @property
    def num_lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n") and bool(self.text))

    def named(self, name: str) -> list:
        """The entities with this qualified name: several, where it is defined again."""
        return [entity for entity in self.entities if entity.name == name]

    def at(self, line: int) -> Entity | None:
        """The innermost entity around a line."""
        around = [entity for entity in self.entities if entity.start <= line <= entity.end]
        return max(around, key=lambda entity: (entity.start, -entity.end)) if around else None

    def packed(self) -> tuple:
        return self.stamp, self.text, self.error, list(map(tuple, self.entities)), self._edges

    def _both(self) -> tuple:
        if not self._unpacked:
            imports, calls = marshal.loads(self._edges)
            self._unpacked = list(map(Import._make, imports)), list(map(Call._make, calls))
        return self._unpacked


class CodeIndex:
    """The Python files below `root`, by path.

    Args:
        cache: a file to keep the index in, for the next process; none: it is kept in memory alone.
    """

    def __init__(self, root: str, cache: str | None = None):
        self.root = os.path.abspath(root)
        self.cache = cache
        self.files: dict = {}
        self.other_paths: list = []
        """Files that are not Python's: listed, not read."""
        self.unreadable: dict = {}
        """Python files that are binary or too large, with their stamps."""
        if cache:
            self._load(cache)

    def refresh(self) -> int:
        """Reads what is new or changed, forgets what is gone. Returns how many files were parsed.

        Raises:
            NotADirectoryError: there is no folder at the root.
        """
        if not os.path.isdir(self.root):
            raise NotADirectoryError(f"{self.root} is not a folder")
        found = walk(self.root)
        self.other_paths = [path for path in found if not path.endswith(PYTHON)]
        stamps = {path: stamp for path, stamp in found.items() if path.endswith(PYTHON)}
        gone = [path for path in self.files if path not in stamps]
        for path in gone:
            del self.files[path]
        parsed = touched = 0
        for path, stamp in stamps.items():
            known = self.files.get(path)
            if (known.stamp if known else self.unreadable.get(path)) == stamp:
                continue
            touched += 1
            unsettled = time.time_ns() - stamp[0] < SETTLED_NS
            text = read_text(os.path.join(self.root, path))
            stamp = (0, stamp[1]) if unsettled else stamp
            if text is None:
                self.files.pop(path, None)
                self.unreadable[path] = stamp
            elif known and known.text == text:
                known.stamp = stamp
            else:
                self.files[path] = SourceFile.read(path, stamp, text)
                parsed += 1
        if self.cache and (touched or gone):
            self._save(self.cache)
        return parsed

    def text_of(self, path: str) -> str | None:
        """Of any listed file; None where it is binary, too large or gone."""
        known = self.files.get(path)
        return known.text if known else read_text(os.path.join(self.root, path))

    def _load(self, cache: str) -> None:
        try:
            with open(cache, "rb") as file:
                made_by, root, files = marshal.load(file)
            if made_by != _maker() or root != self.root:
                return
            for path, (stamp, text, error, entities, edges) in files.items():
                self.files[path] = SourceFile(path, stamp, text, error, list(map(Entity._make, entities)), edges)
        except (OSError, EOFError, ValueError, TypeError):  # none yet, or not ours: it is made anew
            self.files = {}

    def _save(self, cache: str) -> None:
        files = {path: file.packed() for path, file in self.files.items()}
        part = f"{cache}.{os.getpid()}"
        try:
            with open(part, "wb") as file:
                marshal.dump((_maker(), self.root, files), file)
            os.replace(part, cache)
        except OSError:  # no room: the next process parses again
            if os.path.exists(part):
                os.remove(part)


def _maker() -> tuple:
    return (FORMAT, sys.version_info[:2])
