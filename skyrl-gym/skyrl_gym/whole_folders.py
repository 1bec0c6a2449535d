"""Atomic creation and replacement of folders: a folder is complete or absent even if the writing process crashes."""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_SUFFIX = ".partial"
"""Suffix of what is being written. Without a writer, a killed process left it."""

_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_RENAME_SWAP = 2  # RENAME_EXCHANGE of Linux (<linux/fs.h>), RENAME_SWAP of macOS
_AT_FDCWD = -100  # <fcntl.h>


def fsync_folder(folder: str | Path) -> None:
    """Sync the names in a folder (a rename, a new file) to disk, where the file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and all that is in it to the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders of one file system in a single step.

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
def replacing(folder: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that atomically replaces `folder` when the block succeeds. If the process crashes,
    `folder` has its old or its new content."""
    place = Path(folder)
    partial = place.with_name(f"{place.name}{TEMPORARY_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it wrote
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        move_into_place(partial, place)
    except BaseException:  # a KeyboardInterrupt must not leave the half folder either
        shutil.rmtree(partial, ignore_errors=True)
        raise


def move_into_place(partial: Path, place: Path) -> None:
    """Rename a folder, whose files are on disk, to `place`. An existing folder is replaced and then deleted.

    Where the system cannot swap two names, `place` is absent between two renames, and its old content has a third name
    in the same parent folder.
    """
    if not place.exists():
        partial.rename(place)
        fsync_folder(place.parent)
        return
    if not exchange(partial, place):
        aside = place.with_name(f"{place.name}.replaced{TEMPORARY_SUFFIX}")
        shutil.rmtree(aside, ignore_errors=True)
        place.rename(aside)
        partial.rename(place)
        aside.rename(partial)
    fsync_folder(
        place.parent
    )  # before the old folder is deleted: after a power loss its name must not exist without its content
    shutil.rmtree(partial)
