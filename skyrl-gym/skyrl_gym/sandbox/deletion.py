"""Deletion of a folder that hostile code filled, in time proportional to its entries, whatever their depth and modes.

Each folder inside is moved up to the root before it is emptied: no path is long, and few folders are open at a time.
Where the file system is slow or the machine busy, 32,000 folders take minutes all the same. So `delete_locked` leaves
what is not gone in time to a thread of this process, and if the process ends first, to the next one that looks for
folders left behind.
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
    """Delete a folder with all that is in it. Returns False if the deadline came first; a further call goes on."""
    try:
        with suppress(FileNotFoundError):
            folder = os.open(root, FOLDER)
            try:
                for _ in _deletions(folder):
                    if time.monotonic() > deadline:
                        return False
            finally:
                os.close(folder)
            os.rmdir(root)
    except OSError as error:
        raise InfraError(f"the sandbox's folder {root} could not be deleted: {error}") from error
    return True


def _deletions(root: int) -> Iterator[None]:
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
                    _let_owner_in(entry.name, folder, entry.stat(follow_symlinks=False).st_mode)
                    pending.append(next(new_names))
                    os.rename(entry.name, pending[-1], src_dir_fd=folder, dst_dir_fd=root)
                yield
        finally:
            os.close(folder)
        if name != ".":
            os.rmdir(name, dir_fd=root)
            yield


def open_folder(name: str, parent: int, mode: int) -> int:
    """Open a folder, also one whose mode keeps its owner, who may be us, from looking into it."""
    _let_owner_in(name, parent, mode)
    return os.open(name, FOLDER, dir_fd=parent)


def _let_owner_in(name: str, parent: int, mode: int) -> None:
    if mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    # O_PATH needs no permission for the folder itself, and chmod by descriptor follows no link.
    closed = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{closed}", stat.S_IMODE(mode) | stat.S_IRWXU)
    finally:
        os.close(closed)


class LeftFolders:
    """Folders whose deletion takes long, and the thread that deletes one after the other."""

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
                f"{self._folders.maxsize} folders of sandboxes wait to be deleted, {root} is left as it is: programs "
                "write many files, or the disk is slow"
            ) from None

    def _start(self) -> None:
        # Two threads that add their first folder at once start one thread.
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-deletion", daemon=True)
                with suppress(RuntimeError):  # the interpreter ends: the next process will find the folder
                    self._thread.start()

    def wait(self) -> None:
        """Wait until all are gone."""
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


left_folders = LeftFolders()


def _after_fork() -> None:
    """Threads do not come along into a forked process; its parent deletes what it has to."""
    global left_folders
    left_folders = LeftFolders()


os.register_at_fork(after_in_child=_after_fork)
