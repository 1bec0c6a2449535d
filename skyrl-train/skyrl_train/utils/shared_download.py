"""Copy of a remote folder on this machine's disk, shared by all of its processes. Independent of models."""

import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from skyrl_gym.waits import waiting
from skyrl_train.errors import CheckpointError
from skyrl_train.utils.io import FileRecord, compute_sha256
from skyrl_train.utils.storage import Place, download

_LOCK, _COMPLETE = ".lock", ".complete"
_NUM_DOWNLOADS = 4  # concurrently


class SharedDownload:
    """Verified copy of files of a folder in the temporary folder (`TMPDIR`). The first process downloads, others wait
    for it; the last one to release it deletes it.

    Args:
        source: the folder.
        records: size and hash of each file, by relative name.

    Raises:
        CheckpointError: a file is missing or was modified.
        OSError: an error of the store or the disk.
    """

    def __init__(self, source: Place, records: Mapping[str, FileRecord]):
        root = Path(tempfile.gettempdir()) / f"skyrl-downloads-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        described = f"{source} {sorted((name, record.sha256) for name, record in records.items())}"
        self.folder = root / hashlib.sha256(described.encode()).hexdigest()[:32]
        _remove_unused(root)
        self._lock = self._fill(source, records)
        while self._lock is None:
            self._lock = self._fill(source, records)

    def _fill(self, source: Place, records: Mapping[str, FileRecord]) -> int | None:
        """Download, or wait for the downloading process. Returns: a shared lock on the complete copy, or None (another
        process failed, or has just deleted it)."""
        lock = _lock_folder(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if lock is None:  # another process downloads or reads
            lock = _lock_folder(self.folder, fcntl.LOCK_SH)
        elif not (self.folder / _COMPLETE).exists():
            try:
                download_files(source, records, self.folder)
                (self.folder / _COMPLETE).touch()
            except BaseException:  # remove everything after a KeyboardInterrupt, too
                _remove_if_unused(self.folder, lock)
                raise
        assert lock is not None, "only non-blocking locks can be acquired"
        # Changing the kind of a lock releases it briefly, in which another process may delete the folder.
        fcntl.flock(lock, fcntl.LOCK_SH)
        if (self.folder / _COMPLETE).exists() and _is_of(self.folder, lock):
            return lock
        os.close(lock)
        return None

    def release(self) -> None:
        """Release the copy. Memory-mapped files stay readable."""
        if self._lock is not None:
            _remove_if_unused(self.folder, self._lock)
            self._lock = None


def download_files(source: Place, records: Mapping[str, FileRecord], target: Path) -> None:
    """Download files and verify them.

    Raises:
        CheckpointError: one is missing or differs.
        OSError: an error of the store or the disk.
    """

    def fetch(item: tuple[str, FileRecord]) -> str | None:
        name, expected = item
        try:
            download(source / name, target / name)
        except FileNotFoundError:
            return f"{source / name} is missing"
        found = FileRecord((target / name).stat().st_size, compute_sha256(target / name))
        return None if found == expected else f"{source / name} is corrupted (its hash differs)"

    with ThreadPoolExecutor(_NUM_DOWNLOADS) as threads:
        for damage in threads.map(fetch, records.items()):
            if damage:
                raise CheckpointError(damage)


def _lock_folder(folder: Path, kind: int) -> int | None:
    """Create a folder and lock it. Returns: the lock; None if it is taken and `kind` is non-blocking."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # another process has just deleted the folder
            continue
        try:
            with nullcontext() if kind & fcntl.LOCK_NB else waiting("a lock", on=f"lock {folder / _LOCK}"):
                fcntl.flock(lock, kind)
        except BlockingIOError:
            os.close(lock)
            return None
        if _is_of(folder, lock):
            return lock
        os.close(lock)  # the folder was deleted while this process waited


def _is_of(folder: Path, lock: int) -> bool:
    """Return whether a lock belongs to the folder that currently has this name."""
    try:
        return os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK))
    except FileNotFoundError:
        return False


def _remove_if_unused(folder: Path, lock: int) -> None:
    """Delete a folder unless other processes hold it, and close the lock."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed first: a process that starts now creates a new folder.
        unused = folder.rename(folder.with_name(f"unused_{secrets.token_hex(8)}"))
        shutil.rmtree(unused, ignore_errors=True)
    except BlockingIOError:
        pass
    os.close(lock)


def _remove_unused(root: Path) -> None:
    """Delete copies of killed processes."""
    for folder in root.iterdir():
        if (folder / _LOCK).exists() and (lock := _lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
            _remove_if_unused(folder, lock)
