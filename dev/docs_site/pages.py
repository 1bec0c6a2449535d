"""Pages of the site: included files, table of contents, links to other files."""

import os
import posixpath
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "examples/**/README.md",
    "benchmarks/README.md",
    "dev/LOG.md",
    "skyrl-*/README.md",
)
_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")

Contents = list[object]
"""Table of contents as Zensical reads it: paths, and dicts of one title with a path or with `Contents`."""


def pages(root: Path) -> list[PurePosixPath]:
    """Return the Markdown files of the repository that are pages, relative to its root."""
    return sorted({PurePosixPath(path.relative_to(root)) for pattern in PATTERNS for path in root.glob(pattern)})


def paths_of(contents: object) -> Iterator[str]:
    """Yield the paths of a table of contents in order."""
    if isinstance(contents, str):
        yield contents
    elif isinstance(contents, dict):
        for inner in contents.values():
            yield from paths_of(inner)
    elif isinstance(contents, list):
        for inner in contents:
            yield from paths_of(inner)


def expand(contents: Contents, existing: list[str]) -> Contents:
    """Replace each pattern (`docs/*.md`) by the matching pages that the table of contents does not list.

    A page that is added to `docs` needs no line of its own. The first pattern that matches a page takes it; `*` stays
    within a folder.
    """
    rest = [path for path in existing if path not in set(paths_of(contents))]

    def expanded(entry: object) -> list[object]:
        if isinstance(entry, str) and "*" in entry:
            taken = [path for path in rest if fnmatch(path, entry) and path.count("/") == entry.count("/")]
            rest[:] = [path for path in rest if path not in taken]
            return list(taken)
        if isinstance(entry, dict):
            return [
                {key: inner if isinstance(inner, str) else [part for each in inner for part in expanded(each)]}
                for key, inner in entry.items()
            ]
        return [entry]

    return [part for entry in contents for part in expanded(entry)]


def resolve_links(text: str, page: PurePosixPath, root: Path, existing: set[str]) -> str:
    """Point a link to a folder at its README, and leave only the text of one to a file that is not a page."""

    def resolved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(page.parent, match[2]))
        if target in existing or not (root / target).exists() or target.startswith("docs/images/"):
            return match[0]
        readme = posixpath.join(target, "README.md")
        if readme in existing:
            return f"[{match[1]}]({os.path.relpath(readme, page.parent)}{match[3] or ''})"
        return match[1]

    return _LINK.sub(resolved, text)
