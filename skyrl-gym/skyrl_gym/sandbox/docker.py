"""Commands in a container, through the `docker` command line: for machines where bubblewrap cannot work.

One container for one sandbox, removed on `close`. The workspace is a file system in the container's memory, whose size
the kernel keeps. What a command leaves behind ends with it, or with the last of those that run at the same time.
"""

import random
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.base import MEBIBYTE, Limits, Outcome
from skyrl_gym.sandbox.command import Launch, as_bytes
from skyrl_gym.sandbox.host import HostSandbox
from skyrl_gym.sandbox.rlimits import ENVIRONMENT, OPEN_FILES, rlimits
from skyrl_gym.sandbox.workspace import path_parts

IMAGE = "python:3.12-slim"
USERS = range(30_000, 60_000)
"""Each container has a user of its own, because the kernel counts processes for each user of the machine."""
START_SECONDS = 600.0
"""The first start may download the image."""
CALL_SECONDS = 60.0
KEEPER = "end=$(($(date +%s) + 86400)); while [ $(date +%s) -lt $end ]; do sleep 600; done"
"""Process 1: waits, and ends the container that nobody closed after a day."""
SPARE_PROCESSES = 16
BEGIN = 'echo $$ >"/tmp/$0.pid"; exec "$@"'
INTERRUPT = 'kill -INT "$(cat "/tmp/$0.pid")"'
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
        try:
            _docker(self.run_arguments(image, limits), timeout=START_SECONDS)
        except InfraError:
            with suppress(InfraError):
                self.delete()  # it may have been made all the same
            raise

    def run_arguments(self, image: str, limits: Limits) -> list[str]:
        owner = f"uid={self.user},gid={self.user}"
        memory = limits.memory_bytes + limits.workspace_bytes  # the workspace is counted as memory
        return [
            *("run", "--detach", "--rm", "--name", self.name, "--label", "skyrl-gym-sandbox", "--hostname", "sandbox"),
            *("--network", "none", "--ipc", "private", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", f"{self.user}:{self.user}", "--read-only", "--workdir", "/workspace"),
            *("--tmpfs", f"/workspace:rw,exec,nosuid,nodev,mode=0700,{owner},size={limits.workspace_bytes}"),
            *("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=0700,{owner},size={64 * MEBIBYTE}"),
            *("--shm-size", str(64 * MEBIBYTE)),
            *("--memory", str(memory), "--memory-swap", str(memory), "--cpus", "1"),
            *("--pids-limit", str(limits.processes + SPARE_PROCESSES)),
            *("--ulimit", "core=0", "--ulimit", f"nofile={OPEN_FILES}", "--log-driver", "none"),
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

    def shell(self, script: str, *arguments: str) -> None:
        """Runs a script of ours inside. What becomes of it shows in the command it is about."""
        with suppress(subprocess.TimeoutExpired):
            command = self.exec_arguments("sh", "-c", script, *arguments)
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_SECONDS, check=False)

    def runs(self) -> bool:
        with suppress(InfraError):
            return _docker(["inspect", "--format", "{{.State.Running}}", self.name]).strip() == b"true"
        return False

    def delete(self) -> None:
        _docker(["rm", "--force", "--volumes", self.name])

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
        argv = container.exec_arguments(
            *("sh", "-c", BEGIN, mark, "prlimit", *rlimits(limits, processes=limits.processes), "--"),
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

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        # All of the user's processes but process 1: what a command started cannot be told apart from it.
        self._container.shell("kill -9 -1")
        process.kill()

    def interrupt(self, process: "subprocess.Popen[bytes]") -> None:
        self._container.shell(INTERRUPT, self._mark)

    def over_limit(self, process: "subprocess.Popen[bytes]", limits: Limits) -> Outcome | None:
        return None  # memory, processes and files are limited by the container

    def returncode(self, status: int) -> int | None:
        if status != 0 and not self._container.runs():
            return None
        if self._alone:
            self._container.shell("kill -9 -1")
        return 128 - status if 128 < status <= 128 + signal.SIGRTMAX else status

    def close(self) -> None:
        pass


def _docker(arguments: Sequence[str], timeout: float = CALL_SECONDS) -> bytes:
    """Runs the docker command and gives what it prints. Raises InfraError with what it says instead."""
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
