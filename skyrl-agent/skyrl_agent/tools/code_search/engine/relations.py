"""Calls, imports and subclasses of entities."""

from __future__ import annotations

from .index import CodeIndex, SourceFile
from .names import Names, Place

MAX_CANDIDATES = 5
BY_NAME = "by the name alone (the object may be of another class)"
NONE = "  none in this repository"


def callers(index: CodeIndex, names: Names, target: Place) -> str:
    """Find calls of the target, and calls that only share its name."""
    if not target.name:
        return "  a file is not called: ask for its imports, or for something in it"
    targets, called = {target}, {target.name.rpartition(".")[2]}
    owner, _, last = target.name.rpartition(".")
    if last == "__init__":
        targets.add(Place(target.path, owner))
        called.add(owner.rpartition(".")[2])
    called = set().union(*map(names.find_spellings, called))
    certain: dict = {}
    possible: dict = {}
    for file in index.files.values():
        if not any(name in file.text for name in called):
            continue
        for call in file.calls:
            if call.target.rpartition(".")[2] not in called:
                continue
            meaning = names.resolve(file, call.scope, call.target)
            if targets.intersection(meaning.places):
                found = certain if meaning.certain else possible
                found.setdefault(_format_location(file, call.scope), []).append(call.line)
    return _format_two_kinds(certain, possible)


def callees(index: CodeIndex, names: Names, target: Place) -> str:
    file = index.files[target.path]
    certain: dict = {}
    possible: dict = {}
    for call in file.calls:
        if target.name and call.scope != target.name and not call.scope.startswith(target.name + "."):
            continue
        meaning = names.resolve(file, call.scope, call.target)
        if not meaning.certain and len(meaning.places) > MAX_CANDIDATES:
            name = call.target.rpartition(".")[2]
            possible.setdefault(f"one of {len(meaning.places)} methods called {name}", []).append(call.line)
            continue
        for place in meaning.places:
            (certain if meaning.certain else possible).setdefault(place.id, []).append(call.line)
    return _format_two_kinds(certain, possible)


def imports(index: CodeIndex, names: Names, target: Place) -> str:
    """Return the imports of the target's file, and the files that import it or the target."""
    file = index.files[target.path]
    rows = []
    for item, paths in names.imports(file):
        statement = f"from {item.module} import {item.name}" if item.name else f"import {item.module}"
        rows.append(f"  {statement}  -> {', '.join(paths) or 'outside of this repository'}")
    last = target.name.rpartition(".")[2]
    importers = []
    for other in index.files.values():
        for item, paths in names.imports(other):
            if target.path in paths and (not target.name or item.name in (last, "*")):
                importers.append(f"  {other.path}")
                break
    return "\n".join(["imports:", *(rows or ["  nothing"]), "imported by:", *(sorted(importers) or [NONE])])


def inherits(index: CodeIndex, names: Names, target: Place) -> str:
    file = index.files[target.path]
    classes = [entity for entity in file.named(target.name) if entity.kind == "class"]
    if not classes:
        return "  not a class"
    rows = []
    for entity in classes:
        for base, places in names.find_bases(file, entity):
            rows.append(f"  {base}  -> {', '.join(place.id for place in places) or 'outside of this repository'}")
    below = []
    spellings = names.find_spellings(target.name.rpartition(".")[2])
    for other in index.files.values():
        if not any(name in other.text for name in spellings):
            continue
        for entity in other.entities:
            if any(target in places for _, places in names.find_bases(other, entity)):
                below.append(f"  {_format_location(other, entity.name)}  (line {entity.line})")
    return "\n".join(["bases:", *(rows or ["  none"]), "direct subclasses:", *(sorted(below) or [NONE])])


RELATIONS = {"callers": callers, "callees": callees, "imports": imports, "inherits": inherits}


def _format_location(file: SourceFile, scope: str) -> str:
    return Place(file.path, scope).id if scope else f"{file.path} (level of the module)"


def _format_two_kinds(certain: dict, possible: dict) -> str:
    rows = [_format_row(place, lines) for place, lines in sorted(certain.items())]
    if possible:
        rows += [f"{BY_NAME}:", *(_format_row(place, lines) for place, lines in sorted(possible.items()))]
    return "\n".join(rows or [NONE])


def _format_row(place: str, lines: list) -> str:
    numbers = sorted(set(lines))
    return f"  {place}  line{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
