"""Current and recent waits of a process, in a small file that other processes read. Independent of runs.

A hanging process cannot report what it waits for, so it records that before each wait, in a memory-mapped file: the
record survives when the process is stopped or killed. Stacks of all threads are available on request: `SIGNAL` makes
`faulthandler` append them to a second file, without the interpreter.

    with waiting("all_gather #12 of layers.3", on=PEERS): ...       a wait for others
    with waiting("forward_backward"): ...                           work, which contains waits

Nested waits record the outer wait as their parent, also in other threads and tasks of its context. Nothing is written
unless `SKYRL_WAITS` names a folder.
"""

import asyncio
import atexit
import contextlib
import errno
import faulthandler
import itertools
import json
import logging
import mmap
import os
import re
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, cast

logger = logging.getLogger(__name__)

FOLDER = "SKYRL_WAITS"
"""Environment variable that names the folder of a run's records."""

PEERS = "its peers"
"""Target of a collective: the other processes whose role begins as that of this one."""

NEXT_CALL = "the next call"
"""Wait of a process that has nothing to do."""

SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal for stacks. Of the real-time ones, as schedulers of clusters and libraries use SIGUSR1 and SIGUSR2."""

NUM_SLOTS = 1024
HEADER_BYTES, _SLOT_BYTES = 2048, 256
_SLOT = struct.Struct("<QQdddQHH")  # id, parent, begin, end, deadline, thread, given up, bytes of the text
_TEXT_BYTES = _SLOT_BYTES - _SLOT.size
_BYTES = HEADER_BYTES + NUM_SLOTS * _SLOT_BYTES


@dataclass(frozen=True)
class Wait:
    """Record of one wait. Times are Unix seconds."""

    id: int
    parent: int
    """Wait that contains it; 0 for none."""
    who: str
    what: str
    on: str
    """What the process waits for: roles separated by commas, or an address or file; empty for work."""
    began: float
    ended: float = 0.0
    """0: it lasts."""
    deadline: float = 0.0
    """Seconds that it may last; 0 if it has no deadline of its own."""
    thread: int = 0
    was_given_up: bool = False
    """Whether it ended by an exception."""


@dataclass(frozen=True)
class ProcessRecord:
    """Record of a process: `facts` about it, and its present and recent waits, the oldest first."""

    path: Path
    facts: dict[str, Any]
    waits: list[Wait]

    @property
    def role(self) -> str:
        return str(self.facts["role"])

    @property
    def stacks_path(self) -> Path:
        return self.path.with_suffix(".stacks")


class Recorder:
    """Writer of the record of this process.

    Slots are taken in a ring, so that a wait stays readable for a while after its end. Threads need no lock: taking a
    slot from the ring and giving it back are atomic.

    Args:
        role: name of this process in the run, as others name it that wait for it.
        facts: further JSON values of the header.
    """

    def __init__(self, folder: Path, role: str, facts: dict[str, object]):
        folder.mkdir(parents=True, exist_ok=True)
        self.role, self.pid = role, os.getpid()
        self._path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', role)}-{self.pid}.waits"
        try:
            with open(self._path, "w+b", buffering=0) as file:
                _allocate(file.fileno())
                self._map = mmap.mmap(file.fileno(), _BYTES)
            # A descriptor that stays open: a handler of signals writes into it.
            self._stacks = os.open(self._path.with_suffix(".stacks"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        self._facts: dict[str, object] = {
            "role": role,
            "pid": self.pid,
            "host": socket.gethostname(),
            "start": start_ticks(self.pid),
            "began": time.time(),
            "folder": str(folder.resolve()),
            "signal": int(SIGNAL),
        }
        self._free = deque(range(HEADER_BYTES, _BYTES, _SLOT_BYTES))
        self._ids = itertools.count(1)
        faulthandler.register(SIGNAL, file=self._stacks, all_threads=True, chain=False)
        self.add_facts(facts)

    def add_facts(self, facts: dict[str, object]) -> None:
        """Add facts to the header."""
        self._facts |= facts
        header = json.dumps(self._facts).encode()
        if len(header) <= HEADER_BYTES:
            self._map[:HEADER_BYTES] = header.ljust(HEADER_BYTES)

    def begin(self, parent: int, who: str, what: str, on: str, deadline: float) -> tuple[int, int]:
        """Write a wait. Returns: its slot (0 if all are taken) and its id."""
        try:
            slot = self._free.popleft()
        except IndexError:  # more waits at a time than slots: the oldest are written, and they matter most
            return 0, 0
        number = next(self._ids)
        text = f"{who}\0{what}\0{on}".encode("utf-8", "replace")[:_TEXT_BYTES]
        start = slot + _SLOT.size
        self._map[start : start + len(text)] = text
        _SLOT.pack_into(
            self._map, slot, number, parent, time.time(), 0.0, deadline, threading.get_ident(), 0, len(text)
        )
        return slot, number

    def end(self, slot: int, *, given_up: bool) -> None:
        """Write the end of a wait and release its slot."""
        struct.pack_into("<d", self._map, slot + 24, time.time())
        if given_up:
            struct.pack_into("<H", self._map, slot + 48, 1)
        self._free.append(slot)

    def remove(self) -> None:
        """Delete the files of this process."""
        if os.getpid() == self.pid:
            faulthandler.unregister(SIGNAL)
            os.close(self._stacks)
            for path in (self._path, self._path.with_suffix(".stacks")):
                path.unlink(missing_ok=True)


def _allocate(descriptor: int) -> None:
    """Give an empty file its bytes: on a full disk a write into a mapped hole would end the process by SIGBUS. Raises
    OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, _BYTES)
    elif os.write(descriptor, bytes(_BYTES)) != _BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_recorder: Recorder | None = None


class RecordedWait:
    """Context manager that records a wait, around plain code or around code that awaits."""

    __slots__ = ("_deadline", "_on", "_outer", "_recorder", "_slot", "_what", "id", "who")

    def __init__(self, what: str, on: str, who: str, deadline: float):
        self._what, self._on, self.who, self._deadline = what, on, who, deadline
        self._slot = self.id = 0
        self._outer: RecordedWait | None = None
        self._recorder: Recorder | None = None

    def __enter__(self) -> None:
        recorder = self._recorder = _recorder
        if recorder is None:
            return
        outer = self._outer = _innermost.get()
        if not self.who:
            self.who = recorder.role if outer is None else outer.who
        parent = 0 if outer is None else outer.id
        self._slot, self.id = recorder.begin(parent, self.who, self._what, self._on, self._deadline)
        _innermost.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = self._recorder
        if recorder is None:
            return
        if self._slot and recorder is _recorder:  # else it has ended, or is that of the process before a fork
            recorder.end(self._slot, given_up=kind is not None)
        # Not by a token: an asynchronous generator may be closed in another context.
        _innermost.set(self._outer)


_innermost: ContextVar[RecordedWait | None] = ContextVar("innermost_wait", default=None)


def waiting(what: str, on: str = "", *, who: str = "", deadline: float = 0.0) -> RecordedWait:
    """Return a context manager that records a wait for its duration.

    Args:
        what: the awaited event, or the work.
        on: names of the awaited processes, separated by commas, or an address or file; empty for work.
        who: name of the waiter; default: from the outer wait, else the role of this process.
        deadline: timeout in seconds.
    """
    return RecordedWait(what, on, who, deadline)


def report_as(role: str, **facts: object) -> None:
    """Record the waits of this process from here on, under this name; with `FOLDER` unset, nothing.

    Args:
        facts: further JSON values, such as the path of the log.
    """
    global _recorder
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    stop_reporting()
    try:
        _recorder = Recorder(Path(folder), role, facts)
    except (OSError, ValueError) as error:  # a full disk, or one that maps no files, must not end a run
        logger.warning("%s: %s; the waits of this process (%s) are not recorded", folder, error, role)
    else:
        atexit.register(_recorder.remove)


def add_facts(**facts: object) -> None:
    """Add facts to the record of this process, if it has one."""
    if _recorder is not None:
        _recorder.add_facts(facts)


def stop_reporting() -> None:
    """End the record of this process and delete it."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        atexit.unregister(recorder.remove)
        recorder.remove()


_explainer: Callable[[str], str] | None = None


def begin_run(folder: Path, role: str, *, explainer: Callable[[str], str] | None = None, **facts: object) -> None:
    """Record the waits of a run in a folder, for this process (under `role`) and its child processes.

    Args:
        explainer: function that `explanation` calls.
        facts: further JSON values of the record of this process.
    """
    global _explainer
    folder = folder.absolute()
    _remove_records_of_the_dead(folder)
    os.environ[FOLDER], _explainer = str(folder), explainer
    report_as(role, **facts)


def end_run() -> None:
    """End the record that `begin_run` started, in a run that ends normally."""
    global _explainer
    stop_reporting()
    _explainer = None
    if folder := os.environ.pop(FOLDER, ""):
        _remove_records_of_the_dead(Path(folder))
        with contextlib.suppress(OSError):  # processes of other machines may still end
            Path(folder).rmdir()


@contextlib.contextmanager
def recorded_run(
    folder: Path, role: str, *, explainer: Callable[[str], str] | None = None, **facts: object
) -> Iterator[None]:
    """Record the waits of a run while the context lasts, as `begin_run` does."""
    begin_run(folder, role, explainer=explainer, **facts)
    try:
        yield
    finally:
        end_run()


async def explanation(reason: str) -> str:
    """Explain which process waits for which after a deadline has expired. Takes a second or two, in a thread.

    Args:
        reason: sentence that describes the expired wait.

    Returns:
        The end of an error's first line; empty in a process without an explainer.
    """
    return "" if _explainer is None else await asyncio.to_thread(_explainer, reason)


def _reset_after_fork() -> None:
    global _recorder
    _recorder = None  # the file is that of the parent


os.register_at_fork(after_in_child=_reset_after_fork)


# ---- reading


def _remove_records_of_the_dead(folder: Path) -> None:
    """Delete the records of crashed processes. Records of a second run in the folder are kept."""
    for record in read_records(folder):
        if has_ended(record.facts):
            record.path.unlink(missing_ok=True)
            record.stacks_path.unlink(missing_ok=True)


def has_ended(facts: Mapping[str, object]) -> bool:
    """Return True if the process with these facts ran on this machine and has ended."""
    pid = facts.get("pid")
    is_here = facts.get("host") == socket.gethostname() and isinstance(pid, int)
    return is_here and start_ticks(cast(int, pid)) != facts.get("start")


def read_records(folder: Path) -> list[ProcessRecord]:
    """Read the records of all processes, by role. Invalid files and files of another release are skipped."""
    records = []
    for path in sorted(folder.glob("*.waits")):
        with contextlib.suppress(OSError, ValueError, KeyError, struct.error):
            records.append(_read(path))
    return sorted(records, key=lambda record: (record.role, record.facts["pid"]))


def read_facts(data: bytes) -> dict[str, Any]:
    """Read the facts at the start of a record. Raises ValueError for an invalid record."""
    facts = json.loads(data[:HEADER_BYTES])
    if not isinstance(facts, dict) or not isinstance(facts.get("role"), str) or not isinstance(facts.get("pid"), int):
        raise ValueError("it has another header")
    return facts


def _read(path: Path) -> ProcessRecord:
    data = path.read_bytes()
    if len(data) != _BYTES:
        raise ValueError(f"{path} has {len(data)} bytes")
    facts = read_facts(data)
    waits = []
    for slot in range(HEADER_BYTES, _BYTES, _SLOT_BYTES):
        number, parent, began, ended, deadline, thread, given_up, length = _SLOT.unpack_from(data, slot)
        if not number:
            continue
        start = slot + _SLOT.size
        text = data[start : start + min(length, _TEXT_BYTES)].decode("utf-8", "replace").split("\0")
        who, what, on = [*text, "", ""][:3]
        waits.append(Wait(number, parent, who, what, on, began, ended, deadline, thread, bool(given_up)))
    return ProcessRecord(path, facts, sorted(waits, key=lambda wait: wait.id))


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since the boot: with it a pid names one process. 0: unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
