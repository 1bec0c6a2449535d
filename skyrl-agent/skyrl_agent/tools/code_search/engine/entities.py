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
    """Of its first decorator."""
    line: int
    """Of `def` or `class`."""
    body: int
    """Of its first statement."""
    end: int
    signature: str
    doc: str
    """First line of the docstring."""
    bases: tuple
    """Of a class, as they are written: `module.Base`."""


class Import(NamedTuple):
    """A name that an import statement binds."""

    alias: str
    """`a.b` for `import a.b`."""
    module: str
    """With its leading dots."""
    name: str
    """Of what is taken from the module; empty: the module itself; `*`: everything."""
    line: int


class Call(NamedTuple):
    scope: str
    """Qualified name of what makes the call; empty at the level of the module."""
    target: str
    """As written: `self.run`, `module.function`. `?.run` is a call on something without a name, `super().run`."""
    line: int
