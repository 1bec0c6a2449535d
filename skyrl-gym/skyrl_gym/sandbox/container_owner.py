"""Removal of the containers of a process that ended without closing them, by kill -9 too.

Containers carry their owner in a label. A watchdog, one small shell for each process with containers, holds the
reading end of a pipe: when the process ends, however it does, the kernel closes the other end, and the watchdog
removes what has the label. Should the watchdog die with its process, the first container of a later process on the
machine finds them.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.container_engine import EngineName, run_engine
from skyrl_gym.sandbox.keyed_locks import KeyedLocks

LABEL = "skyrl-gym-sandbox"
PREFIX = "skyrl-gym-"
WATCHDOG = """
trap '' HUP INT QUIT TERM
read -r nothing
left=$("$0" ps --all --quiet --filter "label=$1")
[ -z "$left" ] || "$0" rm --force --volumes $left
"""

_watched: dict[EngineName, int] = {}
"""Engine -> writing end of its watchdog's pipe."""
_locks = KeyedLocks()


def get_container_owner(engine: EngineName) -> str:
    """Return this process's name as an owner of containers. The first call starts the watchdog and removes
    containers of processes that have ended."""
    owner = f"{_get_boot_and_namespace()}-{os.getpid()}-{process_start(os.getpid())}"
    with _locks[engine]:
        if engine not in _watched:
            _watched[engine] = _start_watchdog(engine, f"{LABEL}={PREFIX}{owner}")
            remove_abandoned(engine)
    return owner


def remove_abandoned(engine: EngineName) -> list[str]:
    """Remove the containers of processes of this machine that have ended. Returns their names. Raises InfraError."""
    listed = (
        run_engine(engine, ["ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]).decode().split()
    )
    abandoned = [name for name in listed if _has_owner_ended(name)]
    if abandoned:
        with suppress(InfraError):  # another process may be removing them, too
            run_engine(engine, ["rm", "--force", "--volumes", *abandoned])
    return abandoned


def process_start(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _has_owner_ended(name: str) -> bool:
    """Return True if the owner in a container's name was a process of this boot and namespace, and is no more."""
    # A container of an earlier release has no owner in its name: it ends by itself.
    parts = name.removeprefix(PREFIX).rsplit("-", 3)
    if len(parts) != 4 or parts[0] != _get_boot_and_namespace():
        return False
    return str(process_start(int(parts[1]))) != parts[2]


def _get_boot_and_namespace() -> str:
    """Boot of this machine and namespace of process numbers, in which a number means one process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot[:8]}.{os.stat('/proc/self/ns/pid').st_ino}"


def _start_watchdog(engine: EngineName, label: str) -> int:
    """Start the watchdog. Returns the pipe end that wakes it on close; child programs do not inherit it."""
    program = shutil.which(engine)
    if program is None:
        raise InfraError(f"the {engine} command is not installed")
    # Python's pipes are not inherited, so that this process alone holds the writing end.
    reading, writing = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, reading, 0)]
    actions += [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    try:
        # A session of its own: signals to our process group, as from Ctrl-C, must not end it before its work.
        os.posix_spawn("/bin/sh", ["sh", "-c", WATCHDOG, program, label], os.environ, file_actions=actions, setsid=True)
    finally:
        os.close(reading)
    return writing


def _after_fork() -> None:
    """Reset the owner in a forked process, which owns no containers and must not hold its parent's watchdogs back."""
    for writing in _watched.values():
        with suppress(OSError):
            os.close(writing)
    _watched.clear()


os.register_at_fork(after_in_child=_after_fork)
