"""Parsing of Python source in threads."""

import ast
import threading
from contextlib import suppress
from typing import Literal, overload

TRIES = 10
_parsing = threading.RLock()


@overload
def parse_source(source: str, mode: Literal["exec"] = "exec") -> ast.Module: ...
@overload
def parse_source(source: str, mode: Literal["eval"]) -> ast.Expression: ...
def parse_source(source: str, mode: Literal["exec", "eval"] = "exec") -> ast.mod:
    """Parse as `ast.parse` does, also while other threads parse.

    Some releases of CPython (3.11.7 among them) count the depth of the syntax trees of all threads in one variable. If
    another thread parses in the midst of a conversion, where a garbage collection may run Python code, the count does
    not come out even, and good source raises SystemError (gh-106905). Callers of this function take turns; a parse
    elsewhere in the process is met by another try.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as `ast.parse`.
    """
    with _parsing:
        for _ in range(TRIES - 1):
            with suppress(SystemError):
                return ast.parse(source, mode=mode)
        return ast.parse(source, mode=mode)
