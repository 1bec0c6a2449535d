"""Entities and lines that match a search term."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from .index import CodeIndex, SourceFile
from .names import Place, split_module

MAX_LINES = 20
RANKED_FILES = 10
RANKED_ENTITIES = 10
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def find_entities(index: CodeIndex, term: str, paths: list) -> list:
    """Find places with this id or name by the strictest match that finds any: exact case before any case."""
    term = term.strip().replace("::", ":", 1).replace("::", ".")
    path, _, name = term.rpartition(":")
    if path and name:
        where = [found for found in paths if found == path or found.endswith("/" + path)]
        return _find_named(index, name, where) or _find_named(index, name, where, True)
    files = _find_files(term, paths)
    return (
        files
        or _find_named(index, term, paths)
        or _find_dotted(index, term, paths)
        or _find_named(index, term, paths, True)
    )


def _find_named(index: CodeIndex, name: str, paths: list, ignore_case: bool = False) -> list:
    wanted = name.lower() if ignore_case else name
    last = wanted.rpartition(".")[2]
    if not last.isidentifier():
        return []
    found = []
    for path in paths:
        file = index.files[path]
        if last not in (file.text.lower() if ignore_case else file.text):
            continue
        for entity in file.entities:
            known = entity.name.lower() if ignore_case else entity.name
            if known == wanted or known.endswith("." + wanted):
                found.append(Place(path, entity.name))
    return list(dict.fromkeys(found))


def _find_files(term: str, paths: list) -> list:
    if term in paths:
        return [Place(term, "")]
    if not term.endswith((".py", ".pyi")):
        return []
    return [Place(path, "") for path in paths if path.endswith("/" + term)]


def _find_dotted(index: CodeIndex, term: str, paths: list) -> list:
    """Find `package.module.Class.method`: a module and its members."""
    parts = term.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return []
    for count in range(len(parts), 0, -1):
        modules = [path for path in paths if split_module(path)[-count:] == parts[:count]]
        name = ".".join(parts[count:])
        found = [Place(path, name) for path in modules if not name or index.files[path].named(name)]
        if found:
            return found
    return []


class Occurrences(NamedTuple):
    count: int
    lines: list
    """Lines on which it begins, each once; of a file with many, the first ones."""


def text(term: str, texts: dict) -> dict:
    """Map the path of each file (path -> text) that contains a text to its occurrences."""
    found = {}
    for path, content in texts.items():
        count = content.count(term)
        if count:
            found[path] = Occurrences(count, _find_first_lines(term, content))
    return found


def _find_first_lines(term: str, content: str) -> list:
    lines: list = []
    at, line, counted = content.find(term), 1, 0
    while at >= 0 and len(lines) <= MAX_LINES:
        line += content.count("\n", counted, at)
        counted = at
        if not lines or lines[-1] != line:
            lines.append(line)
        at = content.find(term, at + len(term))
    return lines


def rank_by_words(query: str, files: list) -> list:
    """Find places whose source has most of the query's words, weighted by idf, in any word order."""
    words = {word.lower() for word in _WORD.findall(query) if len(word) > 2}
    lowered = {file.path: file.text.lower() for file in files}
    counts = {word: {path: n for path, content in lowered.items() if (n := content.count(word))} for word in words}
    idf = {word: math.log(1 + len(files) / len(found)) for word, found in counts.items() if found}
    scores: dict = {}
    for word, weight in idf.items():
        for path, n in counts[word].items():
            scores[path] = scores.get(path, 0.0) + weight * n / (n + 1.5)
    best = sorted(files, key=lambda file: -scores.get(file.path, 0.0))[:RANKED_FILES]
    found = [item for file in best if scores.get(file.path) for item in _sort_entities(file, idf)]
    return [place for _, place in sorted(found, key=lambda item: -item[0])[:RANKED_ENTITIES]]


def _sort_entities(file: SourceFile, idf: dict) -> list:
    lines = file.text.lower().split("\n")
    found = []
    for entity in file.entities:
        if entity.kind == "class":
            source = f"{entity.name} {entity.doc}".lower()
        else:
            source = "\n".join(lines[entity.start - 1 : entity.end])
        name = entity.name.lower()
        score = sum(weight * (1 + (word in name)) for word, weight in idf.items() if word in source)
        if score:
            found.append((score, Place(file.path, entity.name)))
    return found
