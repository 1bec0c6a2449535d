"""Resolution of names in a file by Python's rules, as far as they can be followed without running anything; beyond
them (the receiver of a method is some object) by the name alone, which the result says."""

from __future__ import annotations

from typing import NamedTuple

from .index import CodeIndex, SourceFile

MAX_HOPS = 8
"""Imports of imports, bases of bases."""


class Place(NamedTuple):
    """An entity, or a file where `name` is empty."""

    path: str
    name: str

    @property
    def id(self) -> str:
        return f"{self.path}:{self.name}" if self.name else self.path


class Meaning(NamedTuple):
    places: list
    certain: bool
    """False: these only have the name in common with what was asked for."""


class Names:
    """Names of one state of an index."""

    def __init__(self, index: CodeIndex):
        self._index = index
        self._methods: dict = {}
        self._modules: dict = {}
        """Dotted name -> paths. Any folder that is no package may be where imports start: `src/package/module.py`."""
        packages = {path.rpartition("/")[0] for path in index.files if path.rpartition("/")[2] == "__init__.py"}
        for path in index.files:
            parts = split_module(path)
            for start in range(len(parts)):
                if "/".join(parts[:start]) not in packages or not start:
                    self._modules.setdefault(".".join(parts[start:]), []).append(path)

    def find_spellings(self, name: str) -> set:
        """Return the names under which files import this name, including itself."""
        known, todo = {name}, [name]
        while todo:
            name = todo.pop()
            for file in self._index.files.values():
                if f"{name} as" in file.text:
                    renamed = {item.alias for item in file.imports if item.name == name}
                    todo += renamed - known
                    known |= renamed
        return known

    def find_called_methods(self, name: str) -> list:
        if name not in self._methods:
            self._methods[name] = [
                Place(path, entity.name)
                for path, file in self._index.files.items()
                if name in file.text
                for entity in file.entities
                if entity.kind == "method" and entity.name.rpartition(".")[2] == name
            ]
        return self._methods[name]

    def module(self, name: str, importer: str = "") -> list:
        """Return the repository paths that an import of `name` in the file `importer` may refer to."""
        dots = len(name) - len(name.lstrip("."))
        folder = importer.rpartition("/")[0]
        if dots:
            parts = [*importer.split("/")[:-dots], *filter(None, name.split("."))]
            return [path for path in self._modules.get(".".join(parts), []) if split_module(path) == parts]
        paths = self._modules.get(name, [])
        exact = [path for path in paths if split_module(path) == name.split(".")]
        return exact or [path for path in paths if path.rpartition("/")[0] == folder] or paths

    def resolve(self, file: SourceFile, scope: str, target: str) -> Meaning:
        """Resolve `target`, written in `scope` of a file."""
        head, *rest = target.split(".")
        if not rest:
            return Meaning(self._resolve_bare(file, scope, head), True)
        found: list = []
        if head in ("self", "cls", "super()"):
            owner = self._find_enclosing_class(file, scope)
            if owner and len(rest) == 1:
                found = (
                    self._find_inherited(file, owner, rest[0])
                    if head == "super()"
                    else self._find_member(file, owner, rest)
                )
        elif head != "?":
            local = self._resolve_bare(file, scope, head, imported=False)
            bound = None if local else self._resolve_imported(file, target)
            if bound is not None:
                return Meaning(bound, True)
            found = [place for start in local for place in self._resolve_inside(start, rest)]
        return Meaning(found, True) if found else Meaning(self.find_called_methods(rest[-1]), False)

    def find_bases(self, file: SourceFile, entity) -> list:
        """Return the bases of a class: (as written, places in the repository)."""
        scope = entity.name.rpartition(".")[0]
        found = []
        for base in entity.bases:
            meaning = self.resolve(file, scope, base)
            found.append((base, meaning.places if meaning.certain else []))
        return found

    def imports(self, file: SourceFile) -> list:
        """Return (import, paths in the repository) of each import."""
        found = []
        for item in file.imports:
            paths = []
            if item.name and item.name != "*":
                separator = "" if item.module.endswith(".") else "."
                paths = self.module(f"{item.module}{separator}{item.name}", file.path)
            found.append((item, paths or self.module(item.module, file.path)))
        return found

    def _resolve_bare(self, file: SourceFile, scope: str, name: str, imported: bool = True) -> list:
        """Resolve by lexical scope: the functions around, the module, its imports. The body of a class is no scope."""
        around = scope
        while around:
            inside_class = any(entity.kind == "class" for entity in file.named(around))
            if not inside_class and file.named(f"{around}.{name}"):
                return [Place(file.path, f"{around}.{name}")]
            around = around.rpartition(".")[0]
        if file.named(name):
            return [Place(file.path, name)]
        return (self._resolve_imported(file, name) or []) if imported else []

    def _resolve_imported(self, file: SourceFile, target: str, hops: int = 0) -> list | None:
        """Resolve a name that an import binds; empty: something outside; None: no import binds it."""
        if hops > MAX_HOPS:
            return []
        bound = [item for item in file.imports if target == item.alias or target.startswith(item.alias + ".")]
        if not bound:
            starred = [item for item in file.imports if item.name == "*"]
            places = [place for item in starred for place in self._resolve_exported(file, item.module, target, hops)]
            return places or None
        item = max(bound, key=lambda item: len(item.alias))
        rest = target[len(item.alias) + 1 :]
        name = ".".join(filter(None, [item.name, rest]))
        return self._resolve_exported(file, item.module, name, hops)

    def _resolve_exported(self, file: SourceFile, module: str, name: str, hops: int) -> list:
        """Resolve `name` of a module that a file imports."""
        parts = name.split(".") if name else []
        separator = "" if module.endswith(".") else "."
        for count in range(len(parts), -1, -1):  # the longest module first: `from package import module`
            prefix = ".".join(parts[:count])
            paths = self.module(module + (separator + prefix if prefix else ""), file.path)
            if not paths:
                continue
            rest = parts[count:]
            if not rest:
                return [Place(path, "") for path in paths]
            found = []
            for path in paths:
                if path == file.path and hops:
                    continue
                inner = self._index.files[path]
                found += (
                    self._resolve_inside(Place(path, ""), rest)
                    or self._resolve_imported(inner, ".".join(rest), hops + 1)
                    or []
                )
            if found:
                return found
        return []

    def _resolve_inside(self, start: Place, rest: list) -> list:
        file = self._index.files[start.path]
        name = ".".join(filter(None, [start.name, rest[0]]))
        classes = [entity for entity in file.named(start.name) if entity.kind == "class"]
        if classes:
            return self._find_member(file, start.name, rest)
        if not file.named(name):
            return []
        return self._resolve_inside(Place(start.path, name), rest[1:]) if len(rest) > 1 else [Place(start.path, name)]

    def _find_enclosing_class(self, file: SourceFile, scope: str) -> str:
        while scope:
            if any(entity.kind == "class" for entity in file.named(scope)):
                return scope
            scope = scope.rpartition(".")[0]
        return ""

    def _find_member(self, file: SourceFile, owner: str, rest: list, hops: int = 0) -> list:
        name = ".".join([owner, *rest])
        return [Place(file.path, name)] if file.named(name) else self._find_inherited(file, owner, ".".join(rest), hops)

    def _find_inherited(self, file: SourceFile, owner: str, name: str, hops: int = 0) -> list:
        """Find the method in the first base class that defines it."""
        if hops > MAX_HOPS:
            return []
        for entity in file.named(owner):
            for _, places in self.find_bases(file, entity):
                for place in places:
                    found = self._find_member(self._index.files[place.path], place.name, name.split("."), hops + 1)
                    if found and place.name:
                        return found
        return []


def split_module(path: str) -> list:
    """Split a path into module parts: `a/b/__init__.py` -> [a, b]."""
    parts = path.rpartition(".")[0].split("/")
    return parts[:-1] if parts[-1] == "__init__" else parts
