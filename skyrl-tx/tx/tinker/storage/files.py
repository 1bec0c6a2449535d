"""Files and folders that survive what kills the process or the machine. Knows paths, not what is in them."""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""Folder of what is being written or removed. What a dead process left in it is removed by `sweep`."""

_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_RENAME_SWAP = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
_AT_FDCWD = -100


def sync_file(path: Path) -> None:
    """Flush a file's bytes to disk, as protection against a power failure."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk, where the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and all its contents to disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent) / name)
        sync_folder(Path(parent))


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically.

    Returns:
        False where the system or the file system (NFS, say) cannot do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first, second = os.fsencode(one), os.fsencode(other)
    if sys.platform == "darwin":
        failed = libc.renamex_np(first, second, _RENAME_SWAP)
    elif hasattr(libc, "renameat2"):
        failed = libc.renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_SWAP)
    else:
        return False
    if failed and (number := ctypes.get_errno()) not in _CANNOT_EXCHANGE:
        raise OSError(number, os.strerror(number), str(one), None, str(other))
    return not failed


@contextmanager
def scratch_folder(partials: Path) -> Iterator[Path]:
    """An empty folder in `partials` that is ours until we leave, or die: a lock beside it says so to `sweep`. It may be
    renamed to where it is wanted."""
    while True:
        holder = partials / secrets.token_hex(8)
        holder.mkdir(parents=True)
        lock = _try_lock(holder)
        if lock is not None:
            break  # else a sweep came between, and is removing it
    try:
        folder = holder / "folder"
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(holder, ignore_errors=True)
        os.close(lock)


def remove_tree(folder: Path, partials: Path) -> None:
    """Remove a folder so that it is at any time either complete under its name or absent. Does nothing if it is
    absent.
    """
    with scratch_folder(partials) as scratch, suppress(FileNotFoundError):
        folder.rename(scratch / folder.name)


def sweep(partials: Path) -> None:
    """Remove files of dead processes in `partials`; files of a living process stay."""
    for holder in partials.iterdir() if partials.is_dir() else ():
        lock = _try_lock(holder)
        if lock is not None:
            shutil.rmtree(holder, ignore_errors=True)
            os.close(lock)


def _try_lock(holder: Path) -> int | None:
    """A descriptor that holds the lock of a folder, or None: another one has it, or the folder is gone. The lock goes
    with the descriptor, so with the process too. It is on a file, since NFS locks no folders."""
    path = holder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock, another process may have deleted the file, or made a new one at its path. A lock on
        # the deleted file would exclude nobody.
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
