"""Checksums of a folder's files, stored in a file of the folder, so that damaged files are never loaded.

    {"files": {"adapter_model.safetensors": {"size": 1234, "sha256": "…"}}}

Folders of releases without checksums have no such file and are not verified.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "tx_manifest.json"
Signature = tuple[tuple[str, int, int, int], ...]


class DamagedFilesError(OSError):
    """Files are not those that were saved. The text names them without the folder: clients read it."""


def list_files(folder: Path) -> list[Path]:
    """List the files of a folder, without the manifest."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def compute_sha256(path: Path) -> str:
    """Hash a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and hash of each file, by its path in the folder."""
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": compute_sha256(path)}
        for path in list_files(folder)
    }


def write_manifest(folder: Path) -> None:
    """Write the checksums of a folder's present files."""
    (folder / MANIFEST).write_bytes(encode_manifest(describe_files(folder)))


def encode_manifest(files: dict[str, dict[str, Any]]) -> bytes:
    return json.dumps({"files": files}, sort_keys=True, indent=1).encode()


def verify(folder: Path) -> None:
    """Read all files of a folder and compare them with its manifest, if there is one.

    Raises:
        DamagedFilesError: some are missing or others than were saved; names all of them.
    """
    if problems := list(find_damage(folder)):
        raise DamagedFilesError("; ".join(problems))


def find_damage(folder: Path) -> Iterator[str]:
    """Describe each file that is missing or is not as it was saved."""
    try:
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        expected = {name: (file["size"], file["sha256"]) for name, file in files.items()}
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, AttributeError):
        yield f"{MANIFEST} (the checksums) is damaged"
        return
    for name, (size, sha256) in expected.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        elif compute_sha256(path) != sha256:
            yield f"{name} is damaged (its sha256 differs from the saved file's)"


def compute_signature(folder: Path) -> Signature:
    """Return facts of a folder's files that change when one is written: cheap to compare."""
    found = ((path.name, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((name, facts.st_ino, facts.st_size, facts.st_mtime_ns) for name, facts in found)
