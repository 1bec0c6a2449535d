"""Crash-safe files and folders. Independent of their contents."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"
"""Folder of what is being written or removed. What a dead process left in it is removed by `remove_leftovers`."""


@contextmanager
def create_scratch_folder(partials: Path) -> Iterator[Path]:
    """Create an empty folder in `partials`, locked until the block or the process ends so that `remove_leftovers` keeps
    it. It may be renamed to its final location.
    """
    while True:
        holder = partials / secrets.token_hex(8)
        holder.mkdir(parents=True)
        lock = _acquire_lock(holder)
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
    with create_scratch_folder(partials) as scratch, suppress(FileNotFoundError):
        folder.rename(scratch / folder.name)


def remove_leftovers(partials: Path) -> None:
    """Remove files of exited processes in `partials`; files of running processes are kept."""
    for holder in partials.iterdir() if partials.is_dir() else ():
        lock = _acquire_lock(holder)
        if lock is not None:
            shutil.rmtree(holder, ignore_errors=True)
            os.close(lock)


def _acquire_lock(holder: Path) -> int | None:
    """Return a descriptor that holds the lock of a folder, or None if it is locked or removed. The lock is released
    with the descriptor, and so with the process. It is on a file, since NFS cannot lock folders.
    """
    path = holder / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock, another process may have deleted the file, or made a new one at its path. A lock on
        # the deleted file would exclude no process.
        if os.path.samestat(os.stat(path), os.fstat(descriptor)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
