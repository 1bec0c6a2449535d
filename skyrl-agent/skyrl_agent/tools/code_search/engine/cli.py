"""The command `search`: `--search_terms NAME [--file_path_or_pattern GLOB] [--line_nums N ...]`."""

from __future__ import annotations

import argparse
import json
import os
import sys

from .relations import RELATIONS
from .render import FORMATS
from .search import EVERYWHERE, RepositorySearch

REFUSED = 3
"""Exit code: the question cannot be answered as it is put."""


def main(argv=None) -> int:
    """Print the result to standard output, or the reason of a failure to standard error."""
    options = _build_parser().parse_args(argv)
    try:
        search = RepositorySearch(options.root, options.cache)
        answer = search.search(
            [term for text in options.search_terms for term in _parse_terms(text)],
            options.file_path_or_pattern,
            options.line_nums,
            options.relation,
            options.format,
            options.max_chars,
        )
    except (ValueError, NotADirectoryError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write((answer + "\n").encode("utf-8", "replace"))
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="search", description="Find code in a Python repository.")
    parser.add_argument("--root", default=os.environ.get("REPO_PATH", "."), help="default: REPO_PATH, or this folder")
    parser.add_argument(
        "--search_terms", nargs="+", action="extend", default=[], help="names, ids, paths or text; or one JSON list"
    )
    parser.add_argument("--file_path_or_pattern", default=EVERYWHERE, help=f"default: {EVERYWHERE}")
    parser.add_argument("--line_nums", nargs="+", action="extend", type=int, default=[], help="lines of the given file")
    parser.add_argument("--relation", choices=sorted(RELATIONS), help="relations of the given terms")
    parser.add_argument("--format", choices=FORMATS)
    parser.add_argument("--max_chars", type=int, default=10_000)
    parser.add_argument("--cache", help="file that stores the index")
    return parser


def _parse_terms(text: str) -> list:
    if text.startswith("["):
        try:
            values = json.loads(text)
        except ValueError:
            return [text]
        if all(isinstance(value, str) for value in values):
            return values
    return [text]
