"""Size limit of run folders. Beyond it, folders of unloaded models are removed, least recently modified first. Other
folders belong to the user and are kept.
"""

import json
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
    """Return the run folders that a server created, least recently modified first; links are ignored."""
    entries = list(os.scandir(runs)) if runs.is_dir() else []
    folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(
        (_measure_folder(each) for each in folders if _is_of_server(each)), key=lambda folder: folder.changed_at
    )


class Removal(NamedTuple):
    """Result of `remove_oldest`."""

    removed: list[str]
    """Names of the removed folders."""
    failed: dict[str, OSError]
    """Errors of those that could not be removed."""
    num_bytes: float
    """Bytes of the rest."""


def remove_oldest(runs: Path, max_bytes: float, live: Set[str]) -> Removal:
    """Remove run folders until the rest takes at most `max_bytes`, or only those named in `live` are left."""
    folders = run_folders(runs)
    removed: list[str] = []
    failed: dict[str, OSError] = {}
    total = sum(folder.num_bytes for folder in folders)
    for path, _, num_bytes in folders:
        if total <= max_bytes:
            break
        if path.name in live:
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            failed[path.name] = error
        else:
            removed.append(path.name)
            total -= num_bytes
    return Removal(removed, failed, total)


def _is_of_server(folder: Path) -> bool:
    try:
        facts = json.loads((folder / "config.yaml").read_text())  # as `RunFiles` writes it
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "tinker" in facts


def _measure_folder(folder: Path) -> RunFolder:
    stats = list(_read_stats(folder))
    changed_at = max((stat.st_mtime for stat in stats), default=0.0)
    return RunFolder(folder, changed_at, sum(stat.st_size for stat in stats))


def _read_stats(folder: Path) -> Iterator[os.stat_result]:
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                yield os.lstat(os.path.join(parent, file))
            except FileNotFoundError:  # deleted by somebody meanwhile
                continue
