"""Facts about the processes of a run: their waits, states, stacks, memory, logs and locks. Draws no conclusion."""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skyrl_gym.waits import ProcessRecord, Wait, read_records, start_ticks
from skyrl_train.types import JsonObject
from skyrl_train.utils.explanations import waits_folder
from skyrl_train.utils.process_log import read_log_tail

GONE, ELSEWHERE = "gone", "elsewhere"
"""States of a process that has ended, and of one that this machine cannot see."""

_STACK_SECONDS = 5.0
"""Wait for the stacks of all processes."""

_STILL_SECONDS = 0.1
"""A file of stacks that did not grow for so long is complete."""

_TOOL_SECONDS = 8.0
"""Timeout of programs that report the state of GPUs or of Ray."""

_LOG_LINES = 8
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")


@dataclass(frozen=True)
class Child:
    """Process that a process of the run has started, which does not report itself."""

    pid: int
    name: str
    state: str


@dataclass(frozen=True)
class ProcessEvidence:
    """State, waits and stacks of a process of the run."""

    role: str
    pid: int
    host: str
    state: str
    """Letter of `/proc/PID/stat` (T: stopped, D: waits for a disk, Z: ended, not collected), `gone` or `elsewhere`."""
    waits: list[Wait]
    """Present and recent ones, the oldest first."""
    began: float = 0.0
    stacks: dict[int, list[str]] = field(default_factory=dict)
    """Frames of each thread, the innermost first."""
    no_stacks: str = ""
    """Why there are none."""
    rss_bytes: int = 0
    children: list[Child] = field(default_factory=list)
    log: str = ""
    log_end: str = ""


@dataclass(frozen=True)
class Situation:
    """State of a run at one moment."""

    now: float
    processes: list[ProcessEvidence]
    lock_holders: dict[str, list[str]] = field(default_factory=dict)
    """Descriptions of the processes that hold a lock, by the lock's path."""
    ray: JsonObject | None = None
    """Free and total resources, and what waits for a place; None without Ray."""
    memory: list[str] = field(default_factory=list)
    """Lines on the memory of this machine and its GPUs."""
    copy_of: str = ""
    """Folder of which this one is a copy: its processes belong to that one."""


def observe(run_dir: Path) -> Situation:
    """Collect the facts of a run. Takes about half a second, some more with Ray or GPUs."""
    folder = waits_folder(run_dir)
    records = read_records(folder)
    copy_of = next((origin for record in records if (origin := _origin(record, folder))), "")
    states = {record.path: ELSEWHERE if copy_of else _state(record) for record in records}
    live = [record for record in records if states[record.path] not in (GONE, ELSEWHERE)]
    stacks = _ask_for_stacks(live, states)
    # Read again: what was awaited when the stacks were written.
    waits = {record.path: record.waits for record in read_records(folder)}
    processes = []
    for record in records:
        found, reason = stacks.get(record.path, ({}, ""))
        state = states[record.path]
        log = str(record.facts.get("log", ""))
        processes.append(
            ProcessEvidence(
                role=record.role,
                pid=record.facts["pid"],
                host=str(record.facts.get("host", "")),
                state=state,
                waits=waits.get(record.path, record.waits),
                began=float(record.facts.get("began", 0.0)),
                stacks=found,
                no_stacks=reason,
                rss_bytes=_rss(record.facts["pid"]) if record in live else 0,
                children=_children(record.facts["pid"], {r.facts["pid"] for r in live}) if record in live else [],
                log=log,
                log_end=read_log_tail(log, _LOG_LINES) if log else "",
            )
        )
    ray_address = next((record.facts["ray"] for record in live if record.facts.get("ray")), None)
    return Situation(
        now=time.time(),
        processes=processes,
        lock_holders=_lock_holders(processes),
        ray=None if ray_address is None else _ray_state(str(ray_address)),
        memory=[*_host_memory(), *_gpu_memory()],
        copy_of=copy_of,
    )


def _origin(record: ProcessRecord, folder: Path) -> str:
    """Return the run folder that a copied record belongs to; empty if it is where it was written."""
    written = Path(str(record.facts.get("folder", "")))
    return "" if written == folder.resolve() else str(written.parent)


def _state(record: ProcessRecord) -> str:
    if record.facts.get("host") != socket.gethostname():
        return ELSEWHERE
    pid = record.facts["pid"]
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return GONE
    return letter if start_ticks(pid) == record.facts.get("start") else GONE  # the number may have been used again


def _rss(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


def _children(pid: int, known: set[int]) -> list[Child]:
    with contextlib.suppress(psutil.Error):
        return [
            Child(child.pid, " ".join(child.cmdline())[:120] or child.name(), _get_state_letter(child))
            for child in psutil.Process(pid).children(recursive=True)
            if child.pid not in known
        ]
    return []


def _get_state_letter(process: psutil.Process) -> str:
    letters = {psutil.STATUS_STOPPED: "T", psutil.STATUS_DISK_SLEEP: "D", psutil.STATUS_ZOMBIE: "Z"}
    return letters.get(process.status(), "S")


# ---- stacks


def _ask_for_stacks(
    records: list[ProcessRecord], states: dict[Path, str]
) -> dict[Path, tuple[dict[int, list[str]], str]]:
    """Return the stacks of each process, or why they are missing, by the path of its record."""
    found: dict[Path, tuple[dict[int, list[str]], str]] = {}
    asked: dict[Path, int] = {}
    paths = {record.stacks_path: record.path for record in records}
    for record in records:
        if states[record.path] in ("T", "t", "Z"):
            found[record.path] = {}, "a stopped process cannot write stacks"
            continue
        try:
            size = record.stacks_path.stat().st_size
            if not _handles(record.facts["pid"], int(record.facts["signal"])):
                found[record.path] = {}, "it does not handle the signal that requests stacks"
                continue
            os.kill(record.facts["pid"], int(record.facts["signal"]))
            asked[record.stacks_path] = size
        except (OSError, ValueError, KeyError) as error:
            found[record.path] = {}, f"they cannot be requested ({error})"
    texts = _appended(asked)
    for path, text in texts.items():
        found[paths[path]] = parse_stacks(text), "" if text else f"no stacks received within {_STACK_SECONDS:g} s"
    return found


def _handles(pid: int, number: int) -> bool:
    """Check that a process has a handler for a signal, which would end it otherwise."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (number - 1) & 1)


def _appended(asked: dict[Path, int]) -> dict[Path, str]:
    """Return what was appended to each stack file after its previous size."""
    deadline = time.monotonic() + _STACK_SECONDS
    sizes, still_since = dict(asked), time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = {path: path.stat().st_size if path.exists() else size for path, size in sizes.items()}
        if now != sizes:
            sizes, still_since = now, time.monotonic()
        elif all(now[path] > asked[path] for path in asked) and time.monotonic() - still_since > _STILL_SECONDS:
            break
    texts = {}
    for path, size in asked.items():
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # a process that has just ended
            file.seek(size)
            texts[path] = file.read().decode("utf-8", "replace")
    return texts


def parse_stacks(text: str) -> dict[int, list[str]]:
    """Return the frames of each thread from a text of `faulthandler`, the innermost first."""
    stacks: dict[int, list[str]] = {}
    frames: list[str] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            frames = stacks[int(match[1], 16)] = []
        elif line.startswith("  "):
            frames.append(line.strip())
    return stacks


# ---- locks, memory, Ray


def _lock_holders(processes: list[ProcessEvidence]) -> dict[str, list[str]]:
    roles = {process.pid: process.role for process in processes if process.state != GONE}
    paths = {wait.on[5:] for process in processes for wait in process.waits if wait.on.startswith("lock ")}
    holders: dict[str, list[str]] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            holders[path] = [_described(pid, roles) for pid in _pids_with_lock(os.stat(path).st_ino)]
    return holders


def _pids_with_lock(inode: int) -> Iterator[int]:
    """Yield the processes of this machine that hold a lock on a file, by `/proc/locks`."""
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if "->" not in words and len(words) > 5 and words[5].rpartition(":")[2] == str(inode):
            yield int(words[4])


def _described(pid: int, roles: dict[int, str]) -> str:
    if pid in roles:
        return f"{roles[pid]} (pid {pid})"
    with contextlib.suppress(psutil.Error):
        return f"pid {pid} ({' '.join(psutil.Process(pid).cmdline())[:120]}), which does not belong to this run"
    return f"pid {pid}, which does not belong to this run"


def _host_memory() -> Iterator[str]:
    memory = psutil.virtual_memory()
    yield f"host: {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"


def _gpu_memory() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = "--query-gpu=index,name,memory.used,memory.total,utilization.gpu"
    return _run(["nvidia-smi", query, "--format=csv"]).splitlines()


def _ray_state(address: str) -> JsonObject:
    text = _run([sys.executable, "-m", "skyrl_inspect.explain.ray_state", address])
    try:
        return json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": text.strip()[-300:] or "no answer"}


def _run(command: list[str]) -> str:
    """Return what a program prints, or why it did not."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )
        return done.stdout or done.stderr
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
