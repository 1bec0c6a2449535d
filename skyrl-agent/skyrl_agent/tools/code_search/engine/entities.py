"""Entities of a Python file. Apart from `outline`, which finds them and needs a parser."""

from __future__ import annotations

from typing import NamedTuple


class Entity(NamedTuple):
    """A class, function or method. Lines count from 1, the last one included."""

    name: str
    """Qualified within its file: `Class.method`."""
    kind: str
    """class, function, method."""
    start: int
    """Line of its first decorator."""
    line: int
    """Line of `def` or `class`."""
    body: int
    """Line of its first statement."""
    end: int
    signature: str
    doc: str
    """First line of the docstring."""
    bases: tuple
    """Base classes of a class, as written: `module.Base`."""


class Import(NamedTuple):
    """A name that an import statement binds."""

    alias: str
    """`a.b` for `import a.b`."""
    module: str
    """Module name with its leading dots."""
    name: str
    """Imported name; empty: the module itself; `*`: all names."""
    line: int


class Call(NamedTuple):
    scope: str
    """Qualified name of what makes the call; empty at the level of the module."""
    target: str
    """Called expression as written: `self.run`, `module.function`. `?.run` is a call on an expression without a name,
    such as `super().run`."""
    line: int
