"""Commands in a container, through the `docker` command line: for machines where bubblewrap cannot work.

One container for one sandbox, removed on `close`. The workspace is a file system in the container's memory, whose size
the kernel keeps. What a command leaves behind ends with it, or with the last of those that run at the same time.
"""

import random
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import MEBIBYTE, Limits, Outcome
from skyrl_gym.sandbox.command import Launch, as_bytes
from skyrl_gym.sandbox.host import HostSandbox
from skyrl_gym.sandbox.rlimits import ENVIRONMENT, OPEN_FILES, rlimits
from skyrl_gym.sandbox.seccomp import MACHINES, seccomp_filter
from skyrl_gym.sandbox.workspace import ENTRY_BYTES, path_parts

IMAGE = "python:3.12-slim"
USERS = range(30_000, 60_000)
"""Each container has a user of its own, because the kernel counts processes for each user of the machine."""
START_SECONDS = 600.0
"""The first start may download the image."""
CALL_SECONDS = 60.0
KEEPER = """
trap '' HUP INT QUIT USR1 USR2 PIPE ALRM TERM
end=$(($(date +%s) + 86400))
while [ $(date +%s) -lt $end ]; do sleep 600; done
"""
"""Process 1: waits, deaf to the commands beside it, and ends a container that nobody closed after a day."""
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
stat --file-system --format "free %a %d" /workspace /tmp /dev/shm
"""
"""Script that kills the remaining processes and reports the limit that was reached. (In a shell `kill` spares the shell
itself.)"""
OUT_OF_MEMORY = re.compile(r"^oom_kill (\d+)", re.MULTILINE)
FULL = re.compile(r"^free (0 \d+|\d+ 0)$", re.MULTILINE)
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
    """A running container and the workspace in it. Raises InfraError if Docker does not start it."""

    python = "python3"

    def __init__(self, image: str, limits: Limits):
        self.name = f"skyrl-gym-{uuid.uuid4().hex}"
        self.user = random.SystemRandom().choice(USERS)
        self._killed_for_memory = 0
        try:
            docker(self.run_arguments(image, limits), timeout=START_SECONDS)
        except InfraError:
            with suppress(InfraError):
                self.delete()  # it may have been made all the same
            raise

    def run_arguments(self, image: str, limits: Limits) -> list[str]:
        place = f"rw,exec,nosuid,nodev,mode=0700,uid={self.user},gid={self.user}"
        memory = limits.memory_bytes + limits.workspace_bytes  # the workspace is counted as memory
        return [
            *("run", "--detach", "--rm", "--name", self.name, "--label", "skyrl-gym-sandbox", "--hostname", "sandbox"),
            *("--network", "none", "--ipc", "private", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", f"{self.user}:{self.user}", "--read-only", "--workdir", "/workspace"),
            *("--tmpfs", f"/workspace:{place},{_size(limits.workspace_bytes)}"),
            *("--tmpfs", f"/tmp:{place},{_size(64 * MEBIBYTE)}"),
            *("--shm-size", str(64 * MEBIBYTE)),
            *("--memory", str(memory), "--memory-swap", str(memory), "--cpus", "1"),
            *("--pids-limit", str(limits.processes + SPARE_PROCESSES)),
            *("--ulimit", "core=1", "--ulimit", f"nofile={OPEN_FILES}", "--log-driver", "none"),
            *(option for item in ENVIRONMENT.items() for option in ("--env", "=".join(item))),
            *("--entrypoint", "sh", image, "-c", KEEPER),
        ]

    def exec_arguments(self, *command: str | bytes) -> list[str | bytes]:
        return ["docker", "exec", "--interactive", "--workdir", "/workspace", self.name, *command]

    def write(self, path: str, data: bytes) -> None:
        ended = self._call(WRITE, *path_parts(path), stdin=data)
        if ended.returncode == 5:
            raise ValueError(f"{path!r} cannot be written in the workspace")
        self._check(ended)

    def read(self, path: str, max_bytes: int) -> bytes:
        ended = self._call(READ, str(max_bytes), *path_parts(path))
        if ended.returncode == 4:
            raise FileNotFoundError(f"no file {path!r} in the workspace")
        if ended.returncode == 5:
            raise ValueError(f"{path!r} is not a plain file of the workspace")
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
        killed = OUT_OF_MEMORY.search(said)
        before, self._killed_for_memory = self._killed_for_memory, int(killed[1]) if killed else 0
        if self._killed_for_memory > before:
            return "memory"
        return "workspace" if FULL.search(said) else None

    def runs(self) -> bool:
        with suppress(InfraError):
            return docker(["inspect", "--format", "{{.State.Running}}", self.name]).strip() == b"true"
        return False

    def delete(self) -> None:
        docker(["rm", "--force", "--volumes", self.name])

    def _call(self, program: str, *arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        command = self.exec_arguments(self.python, "-I", "-S", "-c", program, *arguments)
        try:
            return subprocess.run(command, input=stdin, capture_output=True, timeout=CALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise InfraError(f"docker exec did not end within {CALL_SECONDS} s") from None

    def _check(self, ended: "subprocess.CompletedProcess[bytes]") -> None:
        if ended.returncode != 0:
            raise InfraError(f"docker exec failed: {ended.stderr.decode(errors='replace').strip()}")


class DockerSandbox(HostSandbox[Container]):
    """A `Sandbox` in a container. Made by `make_sandbox("docker")`.

    Args:
        limits: of each command. Memory, processes and workspace hold for the container, whatever `exec` is given.
        image: any with `sh`, `prlimit` and Python 3 on its path.
    """

    python = Container.python

    def __init__(self, limits: Limits | None = None, image: str = IMAGE):
        super().__init__(limits)
        self._image = image

    def _make_workspace(self) -> Container:
        return Container(self._image, self.limits)

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        container = self._started()
        mark = uuid.uuid4().hex
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        filters = ",".join(f"{machine}={seccomp_filter(machine).hex()}" for machine in MACHINES)
        argv = container.exec_arguments(
            *(self.python, "-I", "-S", "-c", BEGIN, mark, filters),
            *("prlimit", *rlimits(limits, processes=limits.processes), "--"),
            *(["env", *map(as_bytes, variables)] if variables else []),
            *map(as_bytes, command),
        )
        others = any(not running.ended for running in self._running)
        return Launch(argv, ContainerCommand(container, mark, alone=not others), None)


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
        return self._ran_out

    def returncode(self, status: int) -> int | None:
        self._seconds = time.monotonic() - self._started
        if status != 0 and not self._container.runs():
            return None
        if self._alone:
            self._ran_out = self._container.end()
        return 128 - status if 128 < status <= 128 + signal.SIGRTMAX else status

    def close(self) -> None:
        pass


def _size(size: int) -> str:
    return f"size={size},nr_inodes={max(16, size // ENTRY_BYTES)}"


def docker(arguments: Sequence[str], timeout: float = CALL_SECONDS) -> bytes:
    """Run the docker command and return its output. Raises InfraError with its error output."""
    try:
        ended = subprocess.run(
            ["docker", *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except FileNotFoundError:
        raise InfraError("the docker command is not installed") from None
    except subprocess.TimeoutExpired:
        raise InfraError(f"docker {arguments[0]} did not end within {timeout} s") from None
    if ended.returncode != 0:
        raise InfraError(f"docker {arguments[0]} failed: {ended.stderr.decode(errors='replace').strip()}")
    return ended.stdout
