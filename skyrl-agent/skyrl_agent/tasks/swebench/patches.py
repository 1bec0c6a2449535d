"""Text of `git diff`: taken apart by file, cleaned. Pure functions."""

import re
from itertools import pairwise

FILE = re.compile(r"^diff --git ", re.MULTILINE)
BINARY = re.compile(r"^(?:GIT binary patch|Binary files .* differ)$", re.MULTILINE)
NEW_NAME = re.compile(r"^\+\+\+ b/(.+?)(?:\t.*)?$", re.MULTILINE)


def split_files(patch: str) -> list[str]:
    """Split a patch by file, in order. Text before the first file is dropped."""
    starts = [found.start() for found in FILE.finditer(patch)]
    return [patch[start:end] for start, end in pairwise([*starts, len(patch)])]


def remove_binary(patch: str) -> str:
    """Remove files that git treats as binary, which cannot be applied from a text patch. Ends with a line feed."""
    kept = "".join(part for part in split_files(patch) if not BINARY.search(part))
    return kept if not kept or kept.endswith("\n") else f"{kept}\n"


def list_changed_paths(patch: str) -> list[str]:
    """Return the paths of files that exist after the patch and differ in text."""
    return [name[1] for part in split_files(patch) if (name := NEW_NAME.search(part))]
