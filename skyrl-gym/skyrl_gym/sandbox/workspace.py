"""Private folder of one sandbox on the host. Its content is untrusted: no symbolic link is followed."""

import fcntl
import glob
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.deletion import CLOSE_SECONDS, FOLDER, delete_locked, open_folder

ENTRY_BYTES = 4096
"""Size that a file counts in addition to its blocks, so that empty files are not free."""
MAX_DEPTH = 64
PREFIX = "skyrl-sandbox-"
SWEEP_SECONDS = 3600
"""Age from which a folder without an owner counts as abandoned."""


class Workspace:
    """`files` is where commands work; `tmp` and `shm` are their /tmp and /dev/shm. All count together.

    Args:
        owner: user and group id that the folders belong to; our own if None.
        root: where it is to be, for who must know beforehand; a new name if None.
    """

    def __init__(self, owner: int | None = None, root: str | None = None):
        _remove_stale_folders()
        self.owner = owner
        if root is not None:
            os.mkdir(root, 0o700)
        self.root = root or tempfile.mkdtemp(prefix=PREFIX)  # mode 0700
        self._lock = os.open(self.root, FOLDER)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # while we live
        for name in ("files", "tmp", "shm"):
            path = os.path.join(self.root, name)
            os.mkdir(path)
            if owner is not None:
                os.chown(path, owner, os.getegid())
        self.files, self.tmp, self.shm = (os.path.join(self.root, name) for name in ("files", "tmp", "shm"))
        self.device = os.stat(self.root).st_dev

    def open(self) -> None:
        """Let their owner and our group into the folders, whatever a command did to their modes."""
        try:
            for folder in (self.files, self.tmp, self.shm):
                os.chmod(folder, 0o770)
        except OSError as error:
            raise InfraError(f"the sandbox folder no longer exists: {error}") from error

    def write(self, path: str, data: bytes) -> None:
        """Write a file, with the folders it needs. What had its name before is replaced, not written through."""
        *folders, name = split_path(path)
        with self._folder(folders, make=True, path=path) as folder:
            with suppress(FileNotFoundError):
                try:
                    os.unlink(name, dir_fd=folder)
                except (IsADirectoryError, PermissionError):
                    raise ValueError(f"{path!r} is a folder or cannot be replaced") from None
            # O_EXCL: a command that makes a link of that name in this moment must not have us write through it.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "wb") as file:
                self._give(file.fileno())
                file.write(data)

    def read(self, path: str, max_bytes: int) -> bytes:
        """Read a regular file. Raises ValueError for any other kind, for a link on the way, and above `max_bytes`."""
        *folders, name = split_path(path)
        with self._folder(folders, make=False, path=path) as folder:
            # Without blocking: a pipe with no writer would hold us.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with _unsafe_is_value_error(path):
                descriptor = os.open(name, flags, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError(f"{path!r} is not a regular file in the workspace")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(max_bytes + 1)
        finally:
            os.close(descriptor)
        if len(data) > max_bytes:
            raise ValueError(f"{path!r} is larger than {max_bytes} bytes")
        return data

    def usage(self, stop_above: int) -> int:
        """Count the bytes of all files, up to `stop_above`. Folders too deep count as all of it."""
        total = 0
        self.open()
        for folder in (self.files, self.tmp, self.shm):
            with suppress(OSError):  # closed again at this moment
                total += _count_tree_bytes(os.open(folder, FOLDER), stop_above - total, MAX_DEPTH)
            if total > stop_above:
                break
        return total

    def delete(self) -> None:
        """Delete everything, slow deletions in the background. May be called more than once."""
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            delete_locked(self.root, lock, time.monotonic() + CLOSE_SECONDS)

    @contextmanager
    def _folder(self, folders: list[str], *, make: bool, path: str) -> Iterator[int]:
        """Yield a descriptor of a folder of the workspace, reached one name at a time and never through a link."""
        descriptor = os.open(self.files, FOLDER)
        try:
            for name in folders:
                with _unsafe_is_value_error(path):
                    if make:
                        with suppress(FileExistsError):
                            os.mkdir(name, 0o755, dir_fd=descriptor)
                    # FOLDER has O_NOFOLLOW: a link on the way is an error, whatever a command puts there.
                    inner = os.open(name, FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
                if make:
                    self._give(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def _give(self, descriptor: int) -> None:
        if self.owner is not None:
            os.fchown(descriptor, self.owner, self.owner)


@cache
def _remove_stale_folders() -> None:
    """Delete folders of killed processes: old folders without a lock holder. Runs once."""
    deadline = time.monotonic() + CLOSE_SECONDS
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{PREFIX}*")):
        with suppress(OSError, InfraError):
            about = os.lstat(path)
            if about.st_uid != os.geteuid() or time.time() - about.st_mtime < SWEEP_SECONDS:
                continue
            lock = os.open(path, FOLDER)
            try:
                # The owner holds this lock for as long as it lives: who gets it finds a folder that was left behind.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            delete_locked(path, lock, deadline)


def split_path(path: str) -> list[str]:
    """Split the path to a file of the workspace. Raises ValueError for a path that leads, or looks, outside."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or not parts or ".." in parts or "\0" in path:
        raise ValueError(f"{path!r} is not a path inside the workspace")
    return parts


@contextmanager
def _unsafe_is_value_error(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"no file {path!r} in the workspace") from None
    except OSError as error:  # a link (ELOOP), not a folder (ENOTDIR), a socket (ENXIO), no permission
        raise ValueError(f"{path!r} is not a regular file in the workspace: {error.strerror}") from None


def _count_tree_bytes(descriptor: int, stop_above: int, depth: int) -> int:
    """Take over the open folder. Entries may come and go meanwhile: a command is running."""
    total = 0
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                try:
                    about = entry.stat(follow_symlinks=False)
                    total += about.st_blocks * 512 + ENTRY_BYTES
                    if stat.S_ISDIR(about.st_mode):
                        if depth == 0:
                            return stop_above + 1
                        inner = open_folder(entry.name, descriptor, about.st_mode)
                        total += _count_tree_bytes(inner, stop_above - total, depth - 1)
                except OSError:
                    continue
                if total > stop_above:
                    return total
    finally:
        os.close(descriptor)
    return total
