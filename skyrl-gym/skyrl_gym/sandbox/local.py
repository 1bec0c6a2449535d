"""Commands contained by bubblewrap: namespaces of their own for everything, no daemon, a few milliseconds.

One `bwrap` per command. Inside, process 1 is a shell that does nothing but wait for the command; when it ends, the
kernel ends whatever else is in the process namespace. Two ways to the same walls:

- As root, the mounts are made with root's eyes (an interpreter below a closed home folder stays usable) and the command
  runs as a user id that nothing else on the machine has, because the kernel does not count the processes of root.
- As any other user, everything happens in a user namespace, in which no further one can be made.
"""

import math
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import command as commands
from skyrl_gym.sandbox.base import ExecResult, Limits, Outcome, SandboxProcess
from skyrl_gym.sandbox.command import Command, Launch, as_bytes
from skyrl_gym.sandbox.seccomp import seccomp_filter
from skyrl_gym.sandbox.workspace import Workspace

OPEN_FILES = 256
NOT_STARTED = 126
START_SECONDS = 5.0
"""How long bubblewrap may take to say which process it made."""
SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
INIT = 'exec 3>&2 2>/dev/null; echo 1000 >/proc/self/oom_score_adj; cd /workspace && (exec "$@" 2>&3 3>&-); exit $?'
"""Process 1: first to be chosen if the machine runs out of memory; its own standard error is not the command's."""
ENVIRONMENT = {
    "HOME": "/workspace",
    "USER": "sandbox",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # A thread takes address space for its stack and its arena: few of them, so that the memory limit means memory.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}
USER = 1000
"""Who a command thinks it is, where that is ours to choose."""
FREE_USERS = range(0x70000000, 0x7F000000)
"""User ids that nobody hands out (https://systemd.io/UIDS-GIDS/)."""
WRITTEN_SHARE = 16
"""How many times `workspace_bytes` a command may write in all: bounds files that are held without a name."""
PACKAGES = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux", "env": "coreutils"}
FIRST_PROCESS = re.compile(rb'"child-pid": (\d+)')
EXIT_CODE = re.compile(rb'"exit-code": (\d+)')
PROPORTIONAL = re.compile(r"^Pss: +(\d+) kB", re.MULTILINE)
WRITTEN = re.compile(r"^write_bytes: (\d+)", re.MULTILINE)
PASSWD = b"sandbox:x:%d:%d::/workspace:/bin/sh\n"
HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"


class LocalSandbox:
    """A `Sandbox` on this machine. Made by `make_sandbox`."""

    python = sys.executable

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._owner = _spare_user()
        self._workspace: Workspace | None = None
        self._running: set[Command] = set()

    def start(self) -> None:
        if self._workspace is None:
            self._workspace = Workspace(self._owner)
            self._finalizer = weakref.finalize(self, _clean, self._running, self._workspace)

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        limits = limits or self.limits
        try:
            running = Command(self._launch(command, env, limits), limits)
        except ValueError as error:  # what no system can start: a zero byte or megabytes in an argument
            return ExecResult("exited", NOT_STARTED, "", f"{error}\n", 0.0)
        try:
            return running.communicate(as_bytes(stdin))
        finally:
            running.kill()
            running.close()

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> SandboxProcess:
        limits = limits or self.limits
        running = commands.background.start(self._launch(command, env, limits), limits)
        self._running.add(running)
        return running

    def write(self, path: str, data: str | bytes) -> None:
        self._started().write(path, as_bytes(data))

    def read(self, path: str) -> bytes:
        return self._started().read(path, self.limits.file_bytes)

    def close(self) -> None:
        if self._workspace is not None:
            self._workspace = None
            self._finalizer()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Workspace:
        if self._workspace is None:
            raise InfraError("the sandbox is not started, or closed")
        return self._workspace

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        workspace = self._started()
        user = self._owner or USER
        data = [seccomp_filter(), PASSWD % (user, user), HOSTS]
        descriptors = [_in_memory(content) for content in data]
        status, inner_status = os.pipe()
        argv: list[str | bytes] = [
            *_bwrap(as_root=self._owner is not None),
            *("--json-status-fd", str(inner_status)),
            *("--add-seccomp-fd", str(descriptors[0])),
            *("--file", str(descriptors[1]), "/etc/passwd"),
            *("--file", str(descriptors[2]), "/etc/hosts"),
            *("--bind", workspace.files, "/workspace"),
            *("--bind", workspace.tmp, "/tmp"),
            *("--bind", workspace.shm, "/dev/shm"),
            *_python_folders(),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--"),
        ]
        if self._owner is not None:
            user_id = str(self._owner)
            argv += [_tool("setpriv"), "--reuid", user_id, "--regid", user_id, "--clear-groups", "--bounding-set=-all"]
            argv += ["--inh-caps=-all", "--pdeathsig", "KILL", "--"]
        argv += ["/bin/sh", "-c", INIT, "sh", _tool("prlimit"), *rlimits(limits, processes=limits.processes + 1), "--"]
        if env:
            argv += [_tool("env"), *(as_bytes(f"{name}={value}") for name, value in env.items())]
        argv += [as_bytes(part) for part in command]
        return Launch(argv, Bubblewrap(status, workspace), {}, "/", [inner_status, *descriptors], self._owner)


class Bubblewrap:
    """The walls around one command, seen from outside.

    Args:
        status: where bwrap says, as lines of JSON, which process is number 1 inside and how it ended.
    """

    def __init__(self, status: int, workspace: Workspace):
        os.set_blocking(status, False)
        self._status_file = os.fdopen(status, "rb", buffering=0)
        self._status = b""
        self._workspace = workspace
        self._proc: int | None = None

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        # Not bwrap itself: it must outlive process 1 to wait for it, and it ends when all inside is gone.
        first = self._first_process(process, START_SECONDS)
        if first is None:
            process.kill()
            return
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        if self._open_proc(process, START_SECONDS):
            with suppress(ProcessLookupError, FileNotFoundError):
                inside = os.open("2", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)  # the shell starts one process
                try:
                    signal.pidfd_send_signal(inside, signal.SIGINT)
                finally:
                    os.close(inside)

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        unlinked = 0
        if self._open_proc(process, 0.0):
            inside = [name for name in os.listdir(self._proc) if name.isdigit()]
            # The first, cheap sum counts shared pages once for each process.
            if all(sum(map(measure, inside)) > limits.memory_bytes for measure in (self._resident, self._proportional)):
                return "memory"
            unlinked = self._unlinked_bytes(inside)
            if self._written_bytes(inside) > WRITTEN_SHARE * limits.workspace_bytes:
                return "workspace"
        used = unlinked + self._workspace.usage(limits.workspace_bytes - unlinked)
        return "workspace" if used > limits.workspace_bytes else None

    def returncode(self, status: int) -> int | None:
        self._read_status()
        ended = EXIT_CODE.search(self._status)  # there only if the walls stood and process 1 was started
        if ended is None:
            return None
        code = int(ended[1])
        return 128 - code if 128 < code <= 128 + signal.SIGRTMAX else code

    def close(self) -> None:
        self._status_file.close()
        if self._proc is not None:
            os.close(self._proc)
            self._proc = None

    def _first_process(self, process: "subprocess.Popen[bytes]", wait_seconds: float) -> int | None:
        """The process id, out here, of process 1 inside; None if there is none (yet, or any more)."""
        if FIRST_PROCESS.search(self._status) is None:
            if wait_seconds:
                select.select([self._status_file], [], [], wait_seconds)
            self._read_status()
        found = FIRST_PROCESS.search(self._status)
        if found is None:
            return None
        with suppress(OSError), open(f"/proc/{int(found[1])}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            return int(found[1]) if parent == process.pid else None  # the number may be another process's by now
        return None

    def _read_status(self) -> None:
        with suppress(BlockingIOError):
            while chunk := os.read(self._status_file.fileno(), 4096):
                self._status += chunk

    def _open_proc(self, process: "subprocess.Popen[bytes]", wait_seconds: float) -> bool:
        """Opens the sandbox's own /proc, which lists its processes and no others. False while it is not mounted."""
        if self._proc is None:
            first = self._first_process(process, wait_seconds)
            if first is None:
                return False
            with suppress(OSError):
                proc = os.open(f"/proc/{first}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if os.fstat(proc).st_dev == os.stat("/proc").st_dev:  # still the machine's: bwrap is at work
                    os.close(proc)
                else:
                    self._proc = proc
        return self._proc is not None

    def _text(self, path: str) -> str:
        """A file of the sandbox's /proc; empty once its process is gone."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return ""
        try:
            return os.read(descriptor, 1 << 16).decode(errors="replace")
        except OSError:
            return ""
        finally:
            os.close(descriptor)

    def _resident(self, process: str) -> int:
        fields = self._text(f"{process}/statm").split()
        return int(fields[1]) * resource.getpagesize() if fields else 0

    def _proportional(self, process: str) -> int:
        found = PROPORTIONAL.search(self._text(f"{process}/smaps_rollup"))
        return int(found[1]) * 1024 if found else self._resident(process)

    def _written_bytes(self, processes: list[str]) -> int:
        """Ever written to disk, also by processes that have ended: process 1 inherits their counts."""
        found = [WRITTEN.search(self._text(f"{process}/io")) for process in processes]
        return sum(int(match[1]) for match in found if match)

    def _unlinked_bytes(self, processes: list[str]) -> int:
        """Of files that have no name any more, but are open."""
        files: dict[int, int] = {}
        for process in processes:
            with suppress(OSError):
                descriptors = os.open(f"{process}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
                try:
                    for name in os.listdir(descriptors):
                        with suppress(OSError):
                            about = os.stat(name, dir_fd=descriptors)
                            if about.st_nlink == 0 and about.st_dev == self._workspace.device:
                                files[about.st_ino] = about.st_blocks * 512
                finally:
                    os.close(descriptors)
        return sum(files.values())


@cache
def _bwrap(as_root: bool) -> list[str]:
    """The part of the command line that is the same for every command. Raises InfraError without bubblewrap."""
    argv = [_tool("bwrap"), "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv", "--hostname", "sandbox"]
    argv += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    argv += ["--cap-drop", "ALL"]
    if as_root:
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    else:
        argv += ["--unshare-user", "--disable-userns", "--uid", str(USER), "--gid", str(USER)]
    for name, value in ENVIRONMENT.items():
        argv += ["--setenv", name, value]
    argv += ["--setenv", "PATH", f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"]
    for folder in SYSTEM_FOLDERS:
        if os.path.islink(folder):
            argv += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            argv += ["--ro-bind", folder, folder]
    argv += ["--perms", "0755", "--dir", "/etc"]
    for path in SYSTEM_FILES:
        argv += ["--ro-bind-try", path, path]
    argv += ["--proc", "/proc", "--perms", "0755", "--tmpfs", "/dev"]
    for name in DEVICES:
        argv += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    argv += ["--symlink", "/proc/self/fd", "/dev/fd"]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        argv += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    return argv


@cache
def _python_folders() -> list[str]:
    """Arguments that make this interpreter visible, below folders that are otherwise empty."""
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.realpath(sys.base_prefix)}
    executable = sys.executable
    while executable:  # each link on the way to the interpreter, as virtual environments and installers make them
        prefixes.add(os.path.dirname(os.path.dirname(executable)))
        target = os.readlink(executable) if os.path.islink(executable) else ""
        executable = os.path.normpath(os.path.join(os.path.dirname(executable), target)) if target else ""
    argv = []
    for prefix in sorted(prefixes):
        if _below(prefix, SYSTEM_FOLDERS):
            continue
        if prefix == "/" or _below(os.path.expanduser("~"), [prefix]):
            raise InfraError(f"Python is installed in {prefix}, which a sandbox cannot show without your home folder")
        for parent in list(reversed(Path(prefix).parents))[1:]:
            argv += ["--perms", "0755", "--dir", str(parent)]
        argv += ["--ro-bind", prefix, prefix]
    return argv


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def rlimits(limits: Limits, processes: int) -> list[str]:
    """Arguments of `prlimit`, none above what this process may have itself."""
    cpu_seconds = math.ceil(limits.cpu_seconds)
    wanted = {
        "as": limits.memory_bytes,
        "fsize": limits.file_bytes,
        "nproc": processes,
        "nofile": OPEN_FILES,
        "core": 0,
        "msgqueue": 0,
        "memlock": 0,
        "rtprio": 0,
    }
    argv = []
    for name, value in wanted.items():
        _, ceiling = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        argv.append(f"--{name}={value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)}")
    _, ceiling = resource.getrlimit(resource.RLIMIT_CPU)
    if ceiling == resource.RLIM_INFINITY or cpu_seconds + 1 <= ceiling:
        argv.append(f"--cpu={cpu_seconds}:{cpu_seconds + 1}")
    return argv


def _spare_user() -> int | None:
    """A user and group id for one sandbox if we are root and may choose, else None."""
    if os.geteuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        first, _, count = max((tuple(map(int, line.split())) for line in file), key=lambda extent: extent[2])
    if count < 1 << 16:
        return None
    if first == 0 and count > FREE_USERS.stop:
        return random.SystemRandom().choice(FREE_USERS)
    return first + count // 2 + random.SystemRandom().randrange(count // 2)


@cache
def _tool(name: str) -> str:
    for folder in ("/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin"):
        if os.access(os.path.join(folder, name), os.X_OK):
            return os.path.join(folder, name)
    raise InfraError(f"{name} is not installed (apt-get install {PACKAGES.get(name, name)})")


def _in_memory(content: bytes) -> int:
    """A descriptor that reads `content`."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _clean(running: set[Command], workspace: Workspace) -> None:
    for command in running:
        command.kill()
        command.close()
    running.clear()
    workspace.delete()
