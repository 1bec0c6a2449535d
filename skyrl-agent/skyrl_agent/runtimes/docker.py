"""A place in a container of any image, through the `docker` command line.

Unlike the gym's sandbox in a container, it is the image's own world: its user (often root), its working directory,
files that can be changed everywhere; no network. What all files together may take is the daemon's matter, not ours.

Process 1 watches the lease's file, which the daemon must be able to mount: it runs on this machine.
"""

import math
import subprocess
import uuid
from collections.abc import Mapping, Sequence

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Limits, RuntimeSpec
from skyrl_agent.runtimes.leases import Lease
from skyrl_agent.runtimes.local import LeasedSandbox
from skyrl_gym.sandbox.command import Launch, as_bytes
from skyrl_gym.sandbox.docker import CALL_SECONDS, IMAGE, SPARE_PROCESSES, Container, ContainerCommand, docker
from skyrl_gym.sandbox.workspace import path_parts

LABEL = "skyrl-agent-lease"
LEASE_FILE = "/run/skyrl-lease"
FOLDER = "/workspace"
"""Working directory of commands, unless the image sets one."""
KEEPER = """
trap '' HUP INT QUIT USR1 USR2 PIPE ALRM TERM
while [ $(($(date +%s) - $(stat -c %Y "$1"))) -le "$2" ]; do sleep 1; done
"""
"""Process 1: deaf to the commands beside it, and ends the container when the lease was not renewed for so long."""
LIMITED = 'ulimit -c 0; ulimit -t "$1" && ulimit -f "$2" && shift 2 && exec "$@"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
READ = 'test -e "$1" || exit 4; test -f "$1" || exit 5; head -c "$2" "$1"'
BLOCK_BYTES = 512


class Machine(Container):
    """A running container. Raises InfraError if Docker does not start it."""

    workdir = "/"

    def __init__(self, spec: RuntimeSpec, lease: Lease) -> None:
        self._lease = lease
        image = spec.image or IMAGE
        if spec.snapshot is not None and spec.snapshot.kind == "image":
            image = str(spec.snapshot.value)
        super().__init__(image, spec.limits)
        configured = docker(["inspect", "--format", "{{.Config.WorkingDir}}", self.name]).decode().strip()
        self.shell('mkdir -p -- "$0"', FOLDER)
        self.workdir = spec.workdir or (configured if configured not in ("", "/") else FOLDER)

    def run_arguments(self, image: str, limits: Limits) -> list[str]:
        memory = str(limits.memory_bytes)
        return [
            *("run", "--detach", "--rm", "--name", self.name, "--label", f"{LABEL}={self._lease.id}"),
            *("--hostname", "sandbox", "--network", "none", "--security-opt", "no-new-privileges"),
            *("--cap-drop", "NET_RAW", "--cap-drop", "MKNOD", "--log-driver", "none"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes + SPARE_PROCESSES)),
            *("--mount", f"type=bind,source={self._lease.path},target={LEASE_FILE},readonly"),
            *("--entrypoint", "sh", image, "-c", KEEPER, "sh", LEASE_FILE, str(math.ceil(self._lease.seconds) + 1)),
        ]

    def exec_arguments(self, *command: str | bytes) -> list[str | bytes]:
        return ["docker", "exec", "--interactive", "--workdir", self.workdir, self.name, *command]

    def write(self, path: str, data: bytes) -> None:
        ended = self._script(WRITE, _relative(path), stdin=data)
        if ended.returncode != 0:
            raise ValueError(f"{path!r} cannot be written: {_error_text(ended)}")

    def read(self, path: str, max_bytes: int) -> bytes:
        ended = self._script(READ, _relative(path), str(max_bytes + 1))
        if ended.returncode == 4:
            raise FileNotFoundError(f"no file {path!r} in the working directory")
        if ended.returncode != 0:
            raise ValueError(f"{path!r} is not a plain file that can be read: {_error_text(ended)}")
        if len(ended.stdout) > max_bytes:
            raise ValueError(f"{path!r} is larger than {max_bytes} bytes")
        return ended.stdout

    def _script(self, script: str, *arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        """Raises InfraError if the container is gone or hangs."""
        command = self.exec_arguments("sh", "-c", script, "sh", *arguments)
        try:
            ended = subprocess.run(command, input=stdin, capture_output=True, timeout=CALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InfraError(f"docker exec failed: {error}") from error
        if ended.returncode not in (0, 4, 5) and not self.runs():
            raise InfraError(f"the container {self.name} is gone: {_error_text(ended)}")
        return ended


class LeasedDockerSandbox(LeasedSandbox[Machine]):
    """See above. Memory and processes are limited for the container as a whole."""

    kind, python = "docker", "python3"

    def __init__(self, spec: RuntimeSpec) -> None:
        super().__init__(spec.limits)
        self._spec = spec

    @property
    def workdir(self) -> str:
        return self._started().workdir

    def _make_workspace(self) -> Machine:
        return Machine(self._spec, self.lease)

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        machine = self._started()
        bounds = (str(max(1, round(limits.cpu_seconds))), str(limits.file_bytes // BLOCK_BYTES))
        variables = [as_bytes(f"{name}={value}") for name, value in (env or {}).items()]
        argv = machine.exec_arguments("sh", "-c", LIMITED, "sh", *bounds, "env", *variables, *map(as_bytes, command))
        return Launch(argv, ContainerCommand(machine, uuid.uuid4().hex, alone=True), None)


def check_docker() -> None:
    """Raises InfraError if no daemon answers."""
    docker(["version", "--format", "{{.Server.Version}}"])


def containers_of(lease_id: str) -> list[str]:
    return docker(["ps", "--all", "--quiet", "--filter", f"label={LABEL}={lease_id}"]).decode().split()


def _relative(path: str) -> str:
    return "./" + "/".join(path_parts(path))


def _error_text(ended: "subprocess.CompletedProcess[bytes]") -> str:
    return ended.stderr.decode(errors="replace").strip()
