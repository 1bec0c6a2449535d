"""Atomic file writes: files are complete or absent. Knows paths and bytes, not their content."""

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from skyrl_gym.waits import waiting
from skyrl_gym.whole_folders import TEMPORARY_SUFFIX, fsync_folder
from skyrl_train.errors import ConfigError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_cloud_path(path: str | Path) -> bool:
    """Return whether a path names an object store rather than a file system."""
    return _URL.match(str(path)) is not None


def expand_path(path: str | Path) -> Path:
    """Return `~/x` or `x` as an absolute path, so that processes with other working directories use the same file.

    Raises:
        ConfigError: the path names an object store.
    """
    if is_cloud_path(path):
        raise ConfigError(f"{path} is a cloud path, but a local path is required; use a folder such as ~/runs/first")
    return Path(path).expanduser().absolute()


@contextmanager
def add_path_to_errors(path: str | Path) -> Iterator[None]:
    """Add the path to an OSError of the block that has none, such as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def is_full_disk(error: BaseException) -> bool:
    """Return whether a write failed because a disk, a quota or a file-size limit is exhausted."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Replace a file atomically: a reader, or a killed process, sees the old content or the new.

    Raises:
        OSError: the disk is full or fails. The old file is unchanged and no temporary file remains.
    """
    with waiting("a write", on=f"file {path}"), open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: str | Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` when the block succeeds. For content that is not held in memory;
    otherwise as `write_atomically`."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with add_path_to_errors(path), open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a KeyboardInterrupt must not leave a partial file either
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


def remove_leftovers(folder: str | Path) -> None:
    """Remove temporary files that killed writers of `write_atomically` left in a folder. Call it only while no process
    writes there."""
    for leftover in Path(folder).glob(f".*{TEMPORARY_SUFFIX}"):
        leftover.unlink()


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


def compute_sha256(path: str | Path) -> str:
    """Compute the SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
