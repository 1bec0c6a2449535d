"""Exclusive ownership of a run's folders by one driver. Independent of the trainer.

    owner.lock   locked (`lockf`) by the driver; the kernel releases it when the driver exits
    owner.json   host, process and start time of the driver, which updates its timestamp every `HEARTBEAT_SECONDS`

The lock decides if it is supported. On file systems without locks, or with locks that other machines do not see, the
record decides. The process of a record of this host must have exited; a record of another host must not have been
updated for `STALE_SECONDS`. Two drivers that start simultaneously are not distinguished by a record alone.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from loguru import logger

from skyrl_gym.waits import has_ended, start_ticks
from skyrl_train.errors import ConfigError
from skyrl_train.utils.io import expand_path, is_cloud_path, write_atomically

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""Seconds without a heartbeat after which a driver of another host counts as exited."""

LOCK, RECORD = "owner.lock", "owner.json"
_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)

_owned: set[tuple[int, Path]] = set()
"""Folders that this process owns, with its id: a forked child owns none."""


@contextmanager
def acquire_run(run_dir: str | Path, ckpt_path: str | Path | None = None) -> Iterator[None]:
    """Own the folder of a run, and of its checkpoints if that is another local folder, within the context. A nested
    context of the same process does nothing.

    Raises:
        ConfigError: another driver owns one. The text names its host and process.
        OSError: the folder cannot be written.
    """
    with ExitStack() as stack:
        folder = expand_path(run_dir).resolve()
        stack.enter_context(_acquire_folder("trainer.run_dir", folder))
        if ckpt_path is not None and not is_cloud_path(ckpt_path):
            checkpoints = expand_path(ckpt_path).resolve()
            if not checkpoints.is_relative_to(folder):
                stack.enter_context(_acquire_folder("trainer.ckpt_path", checkpoints))
        yield


@contextmanager
def _acquire_folder(setting: str, folder: Path) -> Iterator[None]:
    entry = (os.getpid(), folder)
    if entry in _owned:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    # A record lock: a forked child does not inherit it, but closing any descriptor of the file releases it.
    with open(folder / LOCK, "ab") as lock:
        if not _acquire_lock(lock.fileno()):
            raise ConfigError(_build_refusal(setting, folder, _read_record(folder)))
        identity = os.fstat(lock.fileno()).st_ino
        _check_recorded_owner(setting, folder, identity)
        _write_record(folder, identity)
        ended = threading.Event()
        threading.Thread(target=_update_heartbeat, args=(folder / RECORD, ended), daemon=True, name="run owner").start()
        _owned.add(entry)
        try:
            yield
        finally:
            ended.set()
            _owned.discard(entry)
            with suppress(OSError):
                (folder / RECORD).unlink()


def _acquire_lock(descriptor: int) -> bool:
    """Return False if another process holds the lock; True if this one does, or locks are unsupported."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _write_record(folder: Path, identity: int) -> None:
    """Write the owner of the folder. Args: `identity`, inode of the lock file, which reveals a copied folder."""
    pid = os.getpid()
    record = {
        "host": socket.gethostname(),
        "pid": pid,
        "start": start_ticks(pid),
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "lock": identity,
    }
    write_atomically(folder / RECORD, json.dumps(record))


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the record of the owner; empty if it is missing or unreadable."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _update_heartbeat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(HEARTBEAT_SECONDS):
        with suppress(OSError):  # a full disk or an unavailable server must not end the run
            os.utime(path)


def _check_recorded_owner(setting: str, folder: Path, identity: int) -> None:
    """Raise ConfigError if the recorded owner is alive, for file systems without reliable locks.

    Args:
        identity: inode of the lock file.
    """
    record = _read_record(folder)
    if record.get("lock") != identity:
        return
    if record.get("host") == socket.gethostname():
        # Without start times (no /proc) a process cannot be distinguished from a later one with its id: only the lock
        # decides.
        if record.get("start") and record.get("pid") != os.getpid() and not has_ended(record):
            raise ConfigError(_build_refusal(setting, folder, record))
        return
    if not _is_stale(folder):
        raise ConfigError(_build_refusal(setting, folder, record))
    logger.warning(f"{folder}: no heartbeat of its driver ({_describe(record)}) for {STALE_SECONDS:g} s: taking over")


def _is_stale(folder: Path) -> bool:
    """Return whether the record is not updated until it is stale. Compares times of the file system, as clocks of hosts
    differ."""
    os.utime(folder / LOCK)
    path, now = folder / RECORD, (folder / LOCK).stat().st_mtime
    with suppress(FileNotFoundError):  # its owner has exited regularly
        touched = path.stat().st_mtime
        remaining = STALE_SECONDS - max(0.0, now - touched)
        if remaining > 0:
            logger.info(f"{folder} may have a driver on another host: waiting up to {remaining:.0f} s for a heartbeat")
        deadline = time.monotonic() + remaining
        while time.monotonic() < deadline:
            time.sleep(min(1.0, STALE_SECONDS / 20))
            _read_record(folder)  # opening the file makes an NFS client fetch its times from the server
            if path.stat().st_mtime != touched:
                return False
    return True


def _build_refusal(setting: str, folder: Path, record: dict[str, Any]) -> str:
    return (
        f"{setting}={folder} is in use by another running driver: {_describe(record)}. Two drivers of one run would "
        "train and log its steps twice. Wait for it to finish or stop it (SIGTERM); or use another folder for this "
        "run (trainer.run_name or trainer.run_dir)"
    )


def _describe(record: dict[str, Any]) -> str:
    if not record:
        return f"its {RECORD} cannot be read"
    return f"host {record.get('host')}, process {record.get('pid')}, started {record.get('began')}"
