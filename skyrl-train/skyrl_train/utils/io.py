"""Files and folders that are either whole or absent. Knows paths and bytes, not what is in them."""

import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.errors import ConfigError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
TEMPORARY_SUFFIX = ".partial"
"""Suffix of files that are being written. Such a file without a writer was left by a killed process."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


def is_cloud_path(path: str | Path) -> bool:
    """Check whether a path names an object store rather than a file system."""
    return _URL.match(str(path)) is not None


def expand_path(path: str | Path) -> Path:
    """`~/x` or `x` as an absolute path, so that a process with another working folder means the same file.

    Raises:
        ConfigError: the path names an object store.
    """
    if is_cloud_path(path):
        raise ConfigError(
            f"{path} is a cloud path, and this place needs a local one; give a folder such as ~/runs/first"
        )
    return Path(path).expanduser().absolute()


def fsync_folder(folder: str | Path) -> None:
    """Make the names in a folder (a rename, a new file) survive a power cut, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Replace a file as a whole: a reader, or a process killed here, sees the old content or the new, nothing between.

    Raises:
        OSError: the disk is full or refuses. The old file is untouched and nothing is left beside it.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:  # a KeyboardInterrupt must not leave the half file either
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    fsync_folder(path.parent)


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """Yield a folder to write into, which replaces `folder` when the block ends well. Whatever kills the process,
    `folder` is as it was before or as it is after."""
    place = Path(folder)
    partial = place.with_name(f"{place.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it wrote
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        put_in_place(partial, place)
    except BaseException:  # a KeyboardInterrupt must not leave the half folder either
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put_in_place(partial: Path, place: Path) -> None:
    """Rename a folder, whose files are on the disk, to `place`. A folder that is there is replaced and then deleted."""
    if place.exists():
        _exchange(partial, place)
        fsync_folder(place.parent)  # before the old folder goes: a power cut must not bring back its name without it
        shutil.rmtree(partial)
    else:
        partial.rename(place)
        fsync_folder(place.parent)


def _exchange(first: Path, second: Path) -> None:
    """Swap the names of two folders beside each other in one step, which Linux offers on most file systems. Elsewhere
    `second` is absent between two renames, and what it held is beside it under a third name."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if not libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
            return
        if (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(number, os.strerror(number), str(first), None, str(second))
    aside = second.with_name(f"{second.name}.replaced{TEMPORARY_SUFFIX}")
    shutil.rmtree(aside, ignore_errors=True)
    second.rename(aside)
    first.rename(second)
    aside.rename(first)


def _flush(path: Path) -> None:
    if path.is_dir():
        fsync_folder(path)
        return
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def remove_leftovers(folder: str | Path) -> None:
    """Remove temporary files that killed writers of `write_atomically` left in a folder. Only for a time when nobody
    writes there."""
    for leftover in Path(folder).glob(f".*{TEMPORARY_SUFFIX}"):
        leftover.unlink()


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
