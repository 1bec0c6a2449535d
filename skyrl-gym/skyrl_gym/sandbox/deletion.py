"""Deletion of a folder filled by hostile code, in time linear in its entries for any depth and modes.

Each nested folder is moved up to the root before it is emptied, so paths are short and few folders are open at a time.
On a slow file system or busy machine 32,000 folders still take minutes. So `delete_locked` leaves the remainder to a
background thread, and if the process exits first, to the next process that sweeps leftover folders.
"""

import itertools
import logging
import math
import os
import queue
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from skyrl_gym.error import InfraError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
CLOSE_SECONDS = 2.0
"""Longest time that closing a sandbox spends on the deletion of its folder."""
MAX_LEFT = 64
"""Most folders in the queue of the thread; above, closing a sandbox waits for room."""
MAX_WAIT_SECONDS = 120.0
"""Longest wait for room in the queue."""


def delete_locked(root: str, lock: int, deadline: float) -> None:
    """Delete a folder, later if it is not gone by the deadline (of `time.monotonic`).

    Args:
        lock: descriptor of the folder with a lock that says it is ours; closed when the folder is gone.

    Raises:
        InfraError: it cannot be deleted, or too many folders wait for that.
    """
    try:
        gone = delete_folder(root, deadline)
    except BaseException:
        os.close(lock)
        raise
    if gone:
        os.close(lock)
    else:
        left_folders.add(root, lock)


def delete_folder(root: str, deadline: float) -> bool:
    """Delete a folder recursively. Returns False at the deadline; a further call continues."""
    try:
        with suppress(FileNotFoundError):
            folder = os.open(root, FOLDER)
            try:
                for _ in _iter_deletions(folder):
                    if time.monotonic() > deadline:
                        return False
            finally:
                os.close(folder)
            os.rmdir(root)
    except OSError as error:
        raise InfraError(f"the sandbox's folder {root} could not be deleted: {error}") from error
    return True


def _iter_deletions(root: int) -> Iterator[None]:
    """Empty an open folder, one entry for each step."""
    new_names = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
    pending = ["."]
    while pending:
        name = pending.pop()
        # By descriptor and name, never by path: a path can be longer than the kernel takes, or lead through a link.
        folder = open_folder(name, root, os.stat(name, dir_fd=root, follow_symlinks=False).st_mode)
        try:
            with os.scandir(folder) as entries:
                # Read to the end before entries are moved: a scan of a folder that changes may skip some.
                found = list(entries)
            for entry in found:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                # Folders of the root are where they should be; those further down are moved up to it.
                elif name == ".":
                    pending.append(entry.name)
                else:
                    _set_owner_access(entry.name, folder, entry.stat(follow_symlinks=False).st_mode)
                    pending.append(next(new_names))
                    os.rename(entry.name, pending[-1], src_dir_fd=folder, dst_dir_fd=root)
                yield
        finally:
            os.close(folder)
        if name != ".":
            os.rmdir(name, dir_fd=root)
            yield


def open_folder(name: str, parent: int, mode: int) -> int:
    """Open a folder, also if its mode denies access to its owner, who may be this process."""
    _set_owner_access(name, parent, mode)
    return os.open(name, FOLDER, dir_fd=parent)


def _set_owner_access(name: str, parent: int, mode: int) -> None:
    if mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    # O_PATH needs no permission for the folder itself, and chmod by descriptor follows no link.
    closed = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{closed}", stat.S_IMODE(mode) | stat.S_IRWXU)
    finally:
        os.close(closed)


class FolderDeletionQueue:
    """Queue of folders with slow deletion, and the thread that deletes them in order."""

    def __init__(self, max_left: int = MAX_LEFT):
        self._folders: queue.Queue[tuple[str, int]] = queue.Queue(max_left)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def add(self, root: str, lock: int) -> None:
        """Raises InfraError if too many wait, and none of them is gone within `MAX_WAIT_SECONDS`."""
        try:
            self._start()
            self._folders.put((root, lock), timeout=MAX_WAIT_SECONDS)
        except queue.Full:
            os.close(lock)
            raise InfraError(
                f"{self._folders.maxsize} folders of sandboxes are waiting to be deleted, {root} is not deleted: "
                "programs write many files, or the disk is slow"
            ) from None

    def _start(self) -> None:
        # Two threads that add their first folder at once start one thread.
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-deletion", daemon=True)
                with suppress(RuntimeError):  # the interpreter ends: the next process will find the folder
                    self._thread.start()

    def wait(self) -> None:
        """Wait until all folders are deleted."""
        self._folders.join()

    def _run(self) -> None:
        while True:
            root, lock = self._folders.get()
            try:
                delete_folder(root, math.inf)
            except InfraError as error:
                logging.getLogger(__name__).warning("%s", error)
            finally:
                os.close(lock)
                self._folders.task_done()


left_folders = FolderDeletionQueue()


def _after_fork() -> None:
    """Reset the state in a forked process, which has no threads; the parent deletes its folders."""
    global left_folders
    left_folders = FolderDeletionQueue()


os.register_at_fork(after_in_child=_after_fork)
