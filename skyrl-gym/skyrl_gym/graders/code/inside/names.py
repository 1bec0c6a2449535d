"""The names that competitive-programming answers use without importing them."""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import symtable
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes long
    from collections.abc import Iterable
    from typing import Any

# fmt: off
STAR_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "typing",
)
# fmt: on
"""Modules that are searched for a missing name, in this order."""

MODULES = (*STAR_MODULES, "os", "time", "decimal", "fractions", "enum", "dataclasses", "abc")
"""Known by their own names."""

ALIASES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
"""Names by which installed packages are known. They never mean anything of an answer."""

BUILTINS = frozenset(dir(builtins)) - {"copyright", "credits", "help", "license"} | {"exit", "quit"}
"""Built-in names in a sandbox, where `site`, which adds some for interactive use, is not run."""

MISSING = object()


class InstalledPackages:
    """Finder of installed packages, set up on first use: locating them takes Python longer than starting does, and few
    answers need them.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if path is not None:
            return None
        sys.meta_path.remove(self)
        import site

        site.main()
        return importlib.machinery.PathFinder.find_spec(name)


def make_usual_builtins() -> None:
    """Add `exit` and `quit`, as Python's `site` does, which is not run at the start."""
    builtins.exit = builtins.quit = sys.exit
    sys.meta_path.append(InstalledPackages())


def load_usual_modules(code: types.CodeType) -> None:
    """Import those that a compiled program may import, so that each process forked from here finds them loaded."""
    for name in code.co_names:
        if name in MODULES or name in ALIASES:
            _usual(name)
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            load_usual_modules(part)


def find_unbound_names(source: str) -> set[str]:
    """Return the global names that a program reads and never binds, built-in ones left out. Raises SyntaxError."""
    used, bound = global_names(source)
    return used - bound - BUILTINS


def global_names(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that a program reads, and those that it binds. Raises SyntaxError."""
    top = symtable.symtable(source, "<names>", "exec")
    used, bound = set(), set()
    pending = [top]
    while pending:
        table = pending.pop()
        pending += table.get_children()
        for symbol in table.get_symbols():
            if table is not top and not symbol.is_global():
                continue
            if symbol.is_referenced():
                used.add(symbol.get_name())
            if symbol.is_assigned() or symbol.is_imported():
                bound.add(symbol.get_name())
    return used, bound


def get_usual_names(names: Iterable[str]) -> dict[str, object]:
    """Return the subset of `names` that the usual imports define, with their values."""
    found = {name: _usual(name) for name in names if not name.startswith("__")}
    return {name: value for name, value in found.items() if value is not MISSING}


def _usual(name: str) -> object:
    if name in MODULES or name in ALIASES:
        try:
            return importlib.import_module(ALIASES.get(name, name))
        except ImportError:  # numpy and pandas need not be there
            return MISSING
    for module_name in STAR_MODULES:
        module = importlib.import_module(module_name)
        if name in getattr(module, "__all__", ()) or (not hasattr(module, "__all__") and not name.startswith("_")):
            value = getattr(module, name, MISSING)
            if value is not MISSING:
                return value
    return MISSING
