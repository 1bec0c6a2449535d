"""Read-only access to files below one folder. Knows nothing of runs.

Every folder on the way to a file is opened by its name in the one before, and a symbolic link is not followed: no path,
and no change of the tree while it is read, leads outside.
"""

import gzip
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from skyrl_train.errors import DataError
from skyrl_train.utils.run_folder import COMPRESSED, UNREADABLE


class NotBelowError(DataError):
    """A path that leads outside of the folder, through a symbolic link, or to no file."""


@dataclass(frozen=True)
class FileState:
    """Identity and extent of a file. Equal ones mean equal content of a file that is only appended to or replaced."""

    inode: int
    size: int
    modified: float


@dataclass(frozen=True)
class FolderEntry:
    """A file or folder in a folder."""

    name: str
    is_folder: bool
    state: FileState


class RunsFolder:
    """The folder that is served.

    Raises:
        DataError: it is no folder.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser().resolve()
        if not self.path.is_dir():
            raise DataError(f"{self.path} is not a folder: pass a folder of run folders, or a run folder")

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        """Open a regular file for reading, a compressed one (`COMPRESSED`) for its content.

        Raises:
            NotBelowError: the file does not exist, or is compressed and damaged.
        """
        *folders, name = _split_path(path)
        with self._resolve_folder(folders) as parent:
            # O_NONBLOCK: opening a named pipe does not wait for a writer
            number = _open(name, os.O_RDONLY | os.O_NONBLOCK, parent, path)
        with open(number, "rb") as file:
            if not stat.S_ISREG(os.fstat(number).st_mode):
                raise NotBelowError(f"{path} is not a regular file")
            if not path.endswith(COMPRESSED):
                yield file
                return
            try:
                with gzip.GzipFile(fileobj=file) as content:
                    yield content  # pyright: ignore[reportReturnType]  # a binary file without descriptor's extras
            except UNREADABLE as error:
                raise NotBelowError(f"{path} is damaged: {error}") from error

    def state(self, path: str) -> FileState | None:
        """Return the state of a regular file, None if it does not exist."""
        try:
            with self.open(path) as file:
                return _get_state(os.fstat(file.fileno()))
        except NotBelowError:
            return None

    def entries(self, path: str) -> list[FolderEntry]:
        """Return files and folders of a folder by name, without symbolic links; empty if the folder does not exist."""
        found: list[FolderEntry] = []
        try:
            with self._resolve_folder(_split_path(path)) as number, os.scandir(number) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # deleted since it was listed
                        continue
                    if stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode):
                        found.append(FolderEntry(entry.name, stat.S_ISDIR(status.st_mode), _get_state(status)))
        except NotBelowError:
            return []
        return sorted(found, key=lambda entry: entry.name)

    @contextmanager
    def _resolve_folder(self, parts: list[str]) -> Iterator[int]:
        number = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for part in parts:
                below = _open(part, os.O_RDONLY | os.O_DIRECTORY, number, "/".join(parts))
                os.close(number)
                number = below
            yield number
        finally:
            os.close(number)


def join(*parts: str) -> str:
    """Join relative paths; `.` and empty ones are the folder itself."""
    return "/".join(part for part in parts if part not in ("", ".")) or "."


def _open(name: str, flags: int, parent: int, path: str) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        raise NotBelowError(f"{path}: {error.strerror}") from error


def _split_path(path: str) -> list[str]:
    if path == ".":
        return []
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise NotBelowError(f"{path!r} is not a path below the folder")
    return parts


def _get_state(status: os.stat_result) -> FileState:
    return FileState(status.st_ino, status.st_size, status.st_mtime)
