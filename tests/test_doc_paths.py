"""Repository paths that the documentation names in backticks exist."""

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
    *ROOT.glob("*/README.md"),
    *ROOT.glob("docs/*.md"),
]
FILE = re.compile(r"`((?:[\w.-]+/)*(?:[\w.-]+|\{[\w.,-]+\})\.(?:py|md|sh|toml|yaml|yml|proto|jinja2|xml))(?::\w+)?`")
FOLDER = re.compile(r"`((?:skyrl[\w-]*|tx|examples|docs|dev|tests|benchmarks)(?:/[\w.{},-]+)+)/?`")
OTHERS = re.compile(
    r"uv\.toml|train\.py|my_\w+\.py|task\.(toml|yaml)|capitals\.py|sums\.py|\.\.\._\w+\.sh|(srt|penaltylib)/.*|skyrl_train/logs"
)
"""Files of users, of runs and of other projects."""


def spellings(path: str) -> list[str]:
    """Return the paths that braces stand for: `a/{b,c}.py` is `a/b.py` and `a/c.py`."""
    choices = [piece[1:-1].split(",") if piece[:1] == "{" else [piece] for piece in re.split(r"(\{[^}]*\})", path)]
    return ["".join(pieces) for pieces in itertools.product(*choices)]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_documented_paths_exist():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    files = [Path(line) for line in listed.stdout.splitlines()]
    known = {str(path) for file in files for path in (file, *file.parents)}
    ends = {"/".join(parts[start:]) for path in known for parts in [path.split("/")] for start in range(len(parts))}
    named = [
        (page.name, path)
        for page in PAGES
        for match in itertools.chain.from_iterable(kind.findall(page.read_text()) for kind in (FILE, FOLDER))
        for path in spellings(match)
        if not OTHERS.fullmatch(path)
    ]
    assert len(named) > 200, "the patterns find the paths"
    assert [f"{page}: {path}" for page, path in named if path not in ends] == []
