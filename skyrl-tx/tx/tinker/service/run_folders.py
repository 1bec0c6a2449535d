"""Total size of run folders. Beyond a limit those of models that are no longer live go, longest unchanged first."""

import os
import shutil
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple


class RunFolder(NamedTuple):
    """Size of a run folder."""

    path: Path
    changed_at: float
    """Time of the last change of one of its files."""
    num_bytes: int


def run_folders(runs: Path) -> list[RunFolder]:
    """Return the run folders, longest unchanged first; links to folders are none."""
    entries = list(os.scandir(runs)) if runs.is_dir() else []
    folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted((_measured(folder) for folder in folders), key=lambda folder: folder.changed_at)


def remove_oldest(runs: Path, max_bytes: float, live: Set[str]) -> tuple[list[str], float]:
    """Remove run folders until the rest takes at most `max_bytes`, or only those named in `live` are left.

    Returns: names of the removed ones, and the bytes of the rest.

    Raises:
        OSError: one cannot be removed.
    """
    folders, removed = run_folders(runs), []
    total = sum(folder.num_bytes for folder in folders)
    for path, _, num_bytes in folders:
        if total <= max_bytes:
            break
        if path.name not in live:
            shutil.rmtree(path)
            removed.append(path.name)
            total -= num_bytes
    return removed, total


def _measured(folder: Path) -> RunFolder:
    stats = list(_stats(folder))
    changed_at = max((stat.st_mtime for stat in stats), default=0.0)
    return RunFolder(folder, changed_at, sum(stat.st_size for stat in stats))


def _stats(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                yield os.lstat(os.path.join(parent, file))
            except FileNotFoundError:  # deleted by somebody meanwhile
                continue
