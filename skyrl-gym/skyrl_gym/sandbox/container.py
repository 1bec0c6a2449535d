"""Commands in a container, through the common command line of Docker and Podman.

One container per sandbox, removed on `close`. The workspace is a file system in the container's memory with a size
limit of the kernel. Leftover processes of a command are killed with it, or with the last of concurrent commands.
"""

import os
import random
import re
import resource
import signal
import subprocess
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import MEBIBYTE, Limits, Outcome
from skyrl_gym.sandbox.command import Launch
from skyrl_gym.sandbox.container_engine import (
    CALL_SECONDS,
    START_SECONDS,
    EngineName,
    Pull,
    ensure_image,
    forget_image,
    run_engine,
)
from skyrl_gym.sandbox.container_owner import LABEL, get_container_owner
from skyrl_gym.sandbox.environment import carried
from skyrl_gym.sandbox.host import HostSandbox
from skyrl_gym.sandbox.rlimits import ENVIRONMENT, OPEN_FILES, rlimits
from skyrl_gym.sandbox.seccomp import MACHINES, build_seccomp_filter
from skyrl_gym.sandbox.usage import ProcFolder
from skyrl_gym.sandbox.workspace import ENTRY_BYTES, split_path

IMAGE = "python:3.12-slim"
IMAGE_VARIABLE = "SKYRL_GYM_SANDBOX_IMAGE"
USERS = range(30_000, 60_000)
"""Each container has a user of its own, because the kernel counts processes for each user of the machine."""
KEEPER = """
trap '' HUP INT QUIT USR1 USR2 PIPE ALRM TERM
end=$(($(date +%s) + 86400))
while now=$(date +%s); [ -z "$now" ] || [ "$now" -lt $end ]; do sleep 600; done
"""
"""Process 1: waits, ignores signals of the commands in the container, and ends a container that was not closed after a
day. What it runs may be killed at any moment, with the processes that a command left: no output says nothing.
"""
SPARE_PROCESSES = 16
BEGIN = """
import ctypes, os, platform, sys
mark, filters, *command = sys.argv[1:]
with open(f"/tmp/{mark}.pid", "w") as file:
    file.write(str(os.getpid()))
code = bytes.fromhex(dict(pair.split("=") for pair in filters.split(","))[platform.machine()])
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
program = Program(len(code) // 8, code)
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit("no filter of system calls: " + os.strerror(ctypes.get_errno()))
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(126)
"""
"""Puts our filter of system calls on top of Docker's (prctl: PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP), which lets through
sockets to the host of a virtual machine."""
INTERRUPT = 'kill -INT "$(cat "/tmp/$0.pid")"'
END = """
kill -9 -1
cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null
stat -f -c "free %a %d of %c" /workspace /tmp /dev/shm
"""
"""Script that kills the remaining processes and reports the limit that was reached. (In a shell `kill` spares the shell
itself; `stat` has no longer options in busybox.)"""
METERS = "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null"
"""Script that prints the memory limit of the container's control group, of either version."""
OUT_OF_MEMORY = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
FULL = re.compile(r"^free (0 \d+ of \d+|\d+ 0 of [1-9]\d*)$", re.MULTILINE)
"""Matches a file system without free blocks or free inodes. One that does not count inodes, as btrfs, has 0 of 0."""
READ = """
import os, stat, sys
limit, *folders, name = sys.argv[1:]
try:
    at = os.open("/workspace", os.O_RDONLY)
    for folder in folders:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
except FileNotFoundError:
    sys.exit(4)
except OSError:
    sys.exit(5)
if not stat.S_ISREG(os.fstat(file).st_mode):
    sys.exit(5)
sys.stdout.buffer.write(open(file, "rb").read(int(limit) + 1))
"""
WRITE = """
import os, sys
*folders, name = sys.argv[1:]
at = os.open("/workspace", os.O_RDONLY)
try:
    for folder in folders:
        try:
            os.mkdir(folder, dir_fd=at)
        except FileExistsError:
            pass
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    try:
        os.unlink(name, dir_fd=at)
    except FileNotFoundError:
        pass
    file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=at)
except OSError:
    sys.exit(5)
with open(file, "wb") as out:
    while chunk := sys.stdin.buffer.read(1 << 20):
        out.write(chunk)
"""


class Container:
    """A running container and the workspace in it. Raises InfraError if the engine does not start it.

    Args:
        visible: path inside -> path on this machine of what commands can see (not change) besides.
    """

    python = "python3"
    workdir = "/workspace"

    def __init__(
        self,
        engine: EngineName,
        image: str,
        limits: Limits,
        *,
        pull: Pull = "missing",
        visible: Mapping[str, str] | None = None,
    ):
        self.engine: EngineName = engine
        self.limits = limits
        self.user = random.SystemRandom().choice(USERS)
        self._visible = visible or {}
        self._killed_for_memory = 0
        self._proc: ProcFolder | None = None
        ensure_image(engine, image, pull)
        owner = get_container_owner(engine)
        self.name = f"skyrl-gym-{owner}-{uuid.uuid4().hex}"
        try:
            run_engine(engine, self.run_arguments(image, limits), timeout=START_SECONDS)
            self._measure(self.metered_bytes(limits))
        except InfraError:
            forget_image(engine, image)
            with suppress(InfraError):
                self.delete()  # it may have been made all the same
            raise

    def metered_bytes(self, limits: Limits) -> int:
        """Return the memory limit of the container: the workspace is counted as memory."""
        return limits.memory_bytes + limits.workspace_bytes

    def run_arguments(self, image: str, limits: Limits) -> list[str]:
        podman = self.engine == "podman"
        # Podman's tmpfs has neither an owner nor a number of files, and it would add writable folders to `--read-only`.
        owned = "mode=1777" if podman else f"mode=0700,uid={self.user},gid={self.user}"
        memory = str(self.metered_bytes(limits))

        def place(path: str, size: int) -> tuple[str, str]:
            files = "" if podman else f",nr_inodes={max(16, size // ENTRY_BYTES)}"
            return "--tmpfs", f"{path}:rw,exec,nosuid,nodev,{owned},size={size}{files}"

        return [
            *("run", "--detach", "--rm", "--name", self.name, "--label", f"{LABEL}={self.name.rpartition('-')[0]}"),
            *("--pull", "never", "--hostname", "sandbox", "--stop-signal", "KILL", "--log-driver", "none"),
            *("--network", "none", "--ipc", "private", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", f"{self.user}:{self.user}", "--read-only", "--workdir", "/workspace"),
            *(["--read-only-tmpfs=false"] if podman else []),
            *place("/workspace", limits.workspace_bytes),
            *place("/tmp", 64 * MEBIBYTE),
            *("--shm-size", str(64 * MEBIBYTE)),
            *("--memory", memory, "--memory-swap", memory, "--cpus", "1"),
            *("--pids-limit", str(limits.processes + SPARE_PROCESSES)),
            *("--ulimit", "core=1", "--ulimit", f"nofile={OPEN_FILES}"),
            *("--ulimit", f"nproc={limits.processes + SPARE_PROCESSES}"),
            *mounts(self._visible),
            *(option for item in ENVIRONMENT.items() for option in ("--env", "=".join(item))),
            *("--entrypoint", "sh", image, "-c", KEEPER),
        ]

    def exec_arguments(
        self, *command: str | bytes, workdir: str | None = None, passed: Iterable[str] = ()
    ) -> list[str | bytes]:
        """Return the engine's command line.

        Args:
            passed: names of variables that the engine takes from its own environment.
        """
        options = [part for name in passed for part in ("--env", name)]
        place = ["--workdir", workdir or self.workdir, self.name]
        return [self.engine, "exec", "--interactive", *options, *place, *command]

    def _measure(self, memory_bytes: int) -> None:
        """Find out whether the engine's limits hold. Rootless Podman ignores them where it has no control groups: usage
        is then polled from here. Raises InfraError where that cannot be done either."""
        if str(memory_bytes // resource.getpagesize() * resource.getpagesize()) in self.shell(METERS).split():
            return
        number = run_engine(self.engine, ["inspect", "--format", "{{.State.Pid}}", self.name]).decode().strip()
        try:
            self._proc = ProcFolder(f"/proc/{number}/root/proc")
        except OSError as error:
            raise InfraError(
                f"{self.engine} limits neither memory nor processes of a container here (no control groups for it), "
                f"and its processes cannot be watched from this process ({error}): give the engine control groups "
                "(version 2, delegated to this user), or run it as the same user on this machine"
            ) from error

    @property
    def is_metered(self) -> bool:
        """Whether the kernel keeps the limits of memory and processes; else they are polled."""
        return self._proc is None

    def over_limit(self) -> Outcome | None:
        """Return the polled limit that is exceeded; None also where the kernel keeps it."""
        if self._proc is None:
            return None
        processes = self._proc.processes()
        too_many = len(processes) > self.limits.processes + SPARE_PROCESSES
        return "memory" if too_many or self._proc.exceeds_memory(processes, self.limits.memory_bytes) else None

    def write(self, path: str, data: bytes) -> None:
        ended = self._call(WRITE, *split_path(path), stdin=data)
        if ended.returncode == 5:
            raise ValueError(f"{path!r} cannot be written as a regular file in the workspace")
        self._check(ended)

    def read(self, path: str, max_bytes: int) -> bytes:
        ended = self._call(READ, str(max_bytes), *split_path(path))
        if ended.returncode == 4:
            raise FileNotFoundError(f"no file {path!r} in the workspace")
        if ended.returncode == 5:
            raise ValueError(f"{path!r} is not a regular file in the workspace")
        self._check(ended)
        if len(ended.stdout) > max_bytes:
            raise ValueError(f"{path!r} is larger than {max_bytes} bytes")
        return ended.stdout

    def shell(self, script: str, *arguments: str) -> str:
        """Run a script inside and return its output; empty if it does not end: the command it is about fails then."""
        command = self.exec_arguments("sh", "-c", script, *arguments)
        with suppress(subprocess.TimeoutExpired):
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_SECONDS, check=False
            )
            return ended.stdout.decode(errors="replace")
        return ""

    def end(self) -> Outcome | None:
        """End all commands in the container, and return the limits that were reached since the last call."""
        said = self.shell(END)
        killed = OUT_OF_MEMORY.search(said) if self.is_metered else None
        before, self._killed_for_memory = self._killed_for_memory, int(killed[1]) if killed else 0
        if self._killed_for_memory > before:
            return "memory"
        return "workspace" if FULL.search(said) else None

    def runs(self) -> bool:
        with suppress(InfraError):
            return run_engine(self.engine, ["inspect", "--format", "{{.State.Running}}", self.name]).strip() == b"true"
        return False

    def delete(self) -> None:
        if self._proc is not None:
            self._proc.close()
            self._proc = None
        run_engine(self.engine, ["rm", "--force", "--volumes", self.name])

    def _call(self, program: str, *arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        command = self.exec_arguments(self.python, "-I", "-S", "-c", program, *arguments)
        try:
            return subprocess.run(command, input=stdin, capture_output=True, timeout=CALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise InfraError(f"{self.engine} exec did not end within {CALL_SECONDS} s") from None

    def _check(self, ended: "subprocess.CompletedProcess[bytes]") -> None:
        if ended.returncode != 0:
            raise InfraError(f"{self.engine} exec failed: {ended.stderr.decode(errors='replace').strip()}")


class ContainerSandbox(HostSandbox[Container]):
    """A `Sandbox` in a container. Made by `make_sandbox("docker")` and `make_sandbox("podman")`.

    Args:
        limits: of each command. Memory, processes and workspace apply to the container and cannot be overridden in
        `exec`. image: any with `sh`, `prlimit` and Python 3 on its path. Default: the environment variable
            SKYRL_GYM_SANDBOX_IMAGE, or `python:3.12-slim`.
        visible: path inside -> path on this machine of what commands can see (not change) besides.
    """

    python = Container.python

    def __init__(
        self,
        limits: Limits | None = None,
        visible: Mapping[str, str] | None = None,
        *,
        engine: EngineName,
        image: str | None = None,
        pull: Pull = "missing",
    ):
        super().__init__(limits)
        self.engine: EngineName = engine
        self._image = image or os.environ.get(IMAGE_VARIABLE) or IMAGE
        self._visible = visible
        self._pull: Pull = pull

    def _make_workspace(self) -> Container:
        return Container(self.engine, self._image, self.limits, pull=self._pull, visible=self._visible)

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        container = self._started()
        mark = uuid.uuid4().hex
        carriers, command_line = carried(env, command)
        filters = ",".join(f"{machine}={build_seccomp_filter(machine).hex()}" for machine in MACHINES)
        argv = container.exec_arguments(
            *(self.python, "-I", "-S", "-c", BEGIN, mark, filters),
            *("prlimit", *rlimits(limits, processes=limits.processes), "--"),
            *command_line,
            passed=carriers,
        )
        others = any(not running.ended for running in self._running)
        return Launch(argv, ContainerCommand(container, mark, alone=not others), {**os.environ, **carriers})


class ContainerCommand:
    """One command in a container."""

    def __init__(self, container: Container, mark: str, alone: bool):
        self._container = container
        self._mark = mark
        self._alone = alone
        self._started = time.monotonic()
        self._seconds = 0.0
        self._ran_out: Outcome | None = None

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        process.kill()  # first, so that output that nobody reads any more holds nothing up
        # All of the user's processes but process 1: a command's children cannot be distinguished from others.
        self._container.end()

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        self._container.shell(INTERRUPT, self._mark)

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        # While it runs, the container keeps the limits on memory and files; afterwards one can ask which was met.
        if self._ran_out is None and process.returncode == 128 + signal.SIGKILL and self._seconds > limits.cpu_seconds:
            return "cpu_time"
        return self._ran_out or self._container.over_limit()

    def returncode(self, status: int) -> int | None:
        self._seconds = time.monotonic() - self._started
        if status != 0 and not self._container.runs():
            return None
        if self._alone:
            self._ran_out = self._container.end()
        return 128 - status if 128 < status <= 128 + signal.SIGRTMAX else status

    def close(self) -> None:
        pass


def mounts(visible: Mapping[str, str]) -> list[str]:
    """Return options that show paths of this machine inside, read-only."""
    pairs = ((inside, outside) for inside, outside in visible.items())
    return [
        part
        for inside, outside in pairs
        for part in ("--mount", f"type=bind,source={outside},target={inside},readonly")
    ]
