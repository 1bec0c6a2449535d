"""Index of a repository's definitions: only changed files are read again."""

from __future__ import annotations

import marshal
import os
import sys
import time

from .entities import Call, Entity, Import
from .source import PYTHON, list_files, read_text

FORMAT = 2
SETTLED_NS = 100_000_000
"""A file written less than this before it was read may be written again without its time changing."""


class SourceFile:
    """A Python file. Its entities are unpacked at first use: few questions touch many files."""

    def __init__(self, path: str, stamp: tuple, text: str, error: str, contents: bytes):
        self.path, self.stamp, self.text, self.error = path, stamp, text, error
        self._contents = contents
        self._unpacked: tuple = ()

    @classmethod
    def read(cls, path: str, stamp: tuple, text: str) -> SourceFile:
        from .outline import outline  # importing the parser takes longer than most queries

        found = outline(text)
        contents = [[tuple(item) for item in part] for part in (found.entities, found.imports, found.calls)]
        return cls(path, stamp, text, found.error, marshal.dumps(contents))

    @property
    def entities(self) -> list:
        return self._unpack()[0]

    @property
    def imports(self) -> list:
        return self._unpack()[1]

    @property
    def calls(self) -> list:
        return self._unpack()[2]

    @property
    def lines(self) -> list:
        return self.text.split("\n")

    @property
    def num_lines(self) -> int:
        return self.text.count("\n") + (not self.text.endswith("\n") and bool(self.text))

    def named(self, name: str) -> list:
        """Return the entities with this qualified name: several if it is redefined."""
        return [entity for entity in self.entities if entity.name == name]

    def at(self, line: int) -> Entity | None:
        """Return the innermost entity around a line."""
        around = [entity for entity in self.entities if entity.start <= line <= entity.end]
        return max(around, key=lambda entity: (entity.start, -entity.end)) if around else None

    def packed(self) -> tuple:
        return self.stamp, self.text, self.error, self._contents

    def _unpack(self) -> tuple:
        if not self._unpacked:
            parts = zip((Entity, Import, Call), marshal.loads(self._contents))  # noqa: B905 (3.8 has no strict)
            self._unpacked = tuple([kind(*values) for values in part] for kind, part in parts)
        return self._unpacked


class CodeIndex:
    """The Python files below `root`, by path.

    Args:
        cache: a file to keep the index in, for the next process; none: the index is kept in memory only.
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

    def update(self) -> int:
        """Read new and changed files and forget removed ones. Returns the number of files parsed.

        Raises:
            NotADirectoryError: the root is not a folder.
        """
        if not os.path.isdir(self.root):
            raise NotADirectoryError(f"{self.root} is not a folder")
        found = list_files(self.root)
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

    def read_text_of(self, path: str) -> str | None:
        """Return the text of a listed file; None if it is binary, too large or removed."""
        known = self.files.get(path)
        return known.text if known else read_text(os.path.join(self.root, path))

    def _load(self, cache: str) -> None:
        try:
            with open(cache, "rb") as file:
                made_by, root, files = marshal.load(file)
            if made_by != _get_maker() or root != self.root:
                return
            self.files = {path: SourceFile(path, *packed) for path, packed in files.items()}
        except (OSError, EOFError, ValueError, TypeError):  # missing or invalid: rebuild the index
            self.files = {}

    def _save(self, cache: str) -> None:
        files = {path: file.packed() for path, file in self.files.items()}
        part = f"{cache}.{os.getpid()}"
        try:
            with open(part, "wb") as file:
                marshal.dump((_get_maker(), self.root, files), file)
            os.replace(part, cache)
        except OSError:  # not writable: the next process parses again
            if os.path.exists(part):
                os.remove(part)


def _get_maker() -> tuple:
    return (FORMAT, sys.version_info[:2])
