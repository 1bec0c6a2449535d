"""One Python file as data: definitions, imports and calls."""

from __future__ import annotations

import ast
import warnings
from typing import NamedTuple

from .entities import Call, Entity, Import

SIGNATURE_CHARS = 300
DOC_CHARS = 120
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = {ast.Name, ast.Constant, ast.Load, ast.Store, ast.Del, ast.Pass, ast.Break, ast.Continue, ast.Global}


class Outline(NamedTuple):
    entities: list
    imports: list
    calls: list
    error: str = ""
    """Reason why the file could not be parsed; the other fields are then empty."""


def outline(text: str) -> Outline:
    """Find the entities of a file with `\\n` between its lines. Never raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        return Outline([], [], [], f"line {error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:
        return Outline([], [], [], str(error) or type(error).__name__)
    lines = text.split("\n")
    entities: list = []
    imports: list = []
    calls: list = []
    todo: list = [(tree, "", False)]
    while todo:
        node, scope, in_class = todo.pop()
        kind = node.__class__
        if kind in _DEFINITIONS:
            for decorator in node.decorator_list:
                todo.append((decorator, scope, in_class))
            scope = f"{scope}.{node.name}" if scope else node.name
            entities.append(_build_entity(node, scope, in_class, lines))
            in_class = kind is ast.ClassDef
        elif kind is ast.Call:
            target = dotted(node.func)
            if target:
                calls.append(Call(scope, target, node.lineno))
        elif kind is ast.Import:
            imports += [Import(item.asname or item.name, item.name, "", node.lineno) for item in node.names]
        elif kind is ast.ImportFrom:
            module = "." * node.level + (node.module or "")
            imports += [Import(item.asname or item.name, module, item.name, node.lineno) for item in node.names]
        for field in node._fields:
            if field == "decorator_list":
                continue
            value = getattr(node, field, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and child.__class__ not in _LEAVES:
                    todo.append((child, scope, in_class))
    entities.sort(key=lambda entity: entity.start)
    for items in (imports, calls):
        items.sort(key=lambda item: item.line)
    return Outline(entities, imports, calls)


def dotted(node: ast.AST) -> str:
    """Format an expression of names as `a.b.c`; `?.c` if it begins with something else; empty without any name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    elif parts:
        is_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
        parts.append("super()" if is_super else "?")
    return ".".join(reversed(parts))


def elide(text: str, entities: list, keep: int = 3) -> list:
    """Return (line number, line) of a source with elided functions: a body of more than `keep` lines is replaced by a
    note at the number of its first line.
    """
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    shown, number = [], 1
    bodies = {entity.body: entity.end for entity in entities if entity.kind != "class" and entity.body > entity.line}
    while number <= len(lines):
        line = lines[number - 1]
        end = bodies.get(number, 0)
        if end - number + 1 > keep:
            indent = line[: len(line) - len(line.lstrip())]
            shown.append((number, f"{indent}...  # lines {number}-{end}"))
            number = end + 1
        else:
            shown.append((number, line))
            number += 1
    return shown


def _build_entity(node, name: str, in_class: bool, lines: list) -> Entity:
    is_class = isinstance(node, ast.ClassDef)
    first = node.body[0]
    body = min([first.lineno] + [item.lineno for item in getattr(first, "decorator_list", ())])
    start = min([node.lineno] + [item.lineno for item in node.decorator_list])
    header = lines[node.lineno - 1 : body]
    cut = first.col_offset if first.lineno == body else 0
    header[-1] = header[-1].encode("utf-8", "surrogatepass")[:cut].decode("utf-8", "replace")
    signature = " ".join(" ".join(header).split())
    if "#" in signature and hasattr(ast, "unparse"):  # Python 3.9; `#` may also be part of a string
        fields = {field: getattr(node, field) for field in node._fields}
        fields.update(body=[ast.Pass()], decorator_list=[], lineno=1)
        signature = ast.unparse(type(node)(**fields)).split("\n")[0]
    signature = signature.replace("( ", "(").replace(", )", ")").replace(" )", ")")
    doc = (ast.get_docstring(node) or "").strip().split("\n")[0]
    return Entity(
        name,
        "class" if is_class else "method" if in_class else "function",
        start,
        node.lineno,
        body,
        node.end_lineno,
        signature[:SIGNATURE_CHARS],
        doc[:DOC_CHARS],
        tuple(filter(None, map(_format_base, node.bases))) if is_class else (),
    )


def _format_base(node: ast.AST) -> str:
    """Return the unsubscripted base: `Generic` for `Generic[T]`."""
    return dotted(node.value if isinstance(node, ast.Subscript) else node)
