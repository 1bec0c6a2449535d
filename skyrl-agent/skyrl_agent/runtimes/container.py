"""Runtime in a container of any image, through the command line of Docker or Podman.

Unlike the gym's sandbox in a container, it is the image's own world: its user (often root), its working directory,
files that can be changed everywhere; no network. What all files together may take is the engine's matter, unless the
container is read-only: then only its working directory and /tmp can be written, and both have a size.

Process 1 watches the lease's file, which the engine must be able to mount: it runs on this machine.
"""

import math
import os
import resource
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Limits, RuntimeSpec
from skyrl_agent.runtimes.leases import Lease
from skyrl_agent.runtimes.local import LeasedSandbox
from skyrl_gym.sandbox.base import MEBIBYTE
from skyrl_gym.sandbox.command import Launch
from skyrl_gym.sandbox.container import IMAGE, SPARE_PROCESSES, Container, ContainerCommand
from skyrl_gym.sandbox.container_engine import CALL_SECONDS, EngineName, find_engine, run_engine
from skyrl_gym.sandbox.environment import carried
from skyrl_gym.sandbox.workspace import split_path

LABEL = "skyrl-agent-lease"
LEASE_FILE = "/run/skyrl-lease"
FOLDER = "/workspace"
"""Working directory of commands, unless the image sets one."""
KEEPER = """
trap '' HUP INT QUIT USR1 USR2 PIPE ALRM TERM
misses=0
while [ $misses -lt 60 ]; do
    now=$(date +%s) beat=$(stat -c %Y "$1")
    if [ -z "$now" ] || [ -z "$beat" ]; then misses=$((misses + 1)); else
        misses=0
        [ $((now - beat)) -le "$2" ] || exit 0
    fi
    sleep 1
done
"""
"""Process 1: ignores signals of the commands in the container, and ends the container when the lease was not renewed
for so long. What it runs may be killed at any moment, with the processes that a command left: no output says nothing,
unless it goes on.
"""
LIMITED = 'ulimit -c 0; ulimit -t "$1" && ulimit -f "$2" && shift 2 && exec "$@"'
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"'
READ = 'test -e "$1" || exit 4; test -f "$1" || exit 5; head -c "$2" "$1"'
BLOCK_BYTES = 512


NEEDED_RIGHTS = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "NET_BIND_SERVICE")
"""Capabilities that root keeps inside, to install packages, change users and serve a port."""
MAX_OPEN_FILES, MAX_PROCESSES = 1 << 16, 1 << 15
"""Bounds of a container's resource limits; control groups or polling limit its processes before."""


class Machine(Container):
    """A running container. Raises InfraError if the engine does not start it."""

    workdir = "/"

    def __init__(self, spec: RuntimeSpec, engine: EngineName, lease: Lease) -> None:
        self._lease = lease
        self._spec = spec
        image = spec.image or IMAGE
        if spec.snapshot is not None and spec.snapshot.kind == "image":
            image = str(spec.snapshot.value)
        super().__init__(engine, image, spec.limits, pull=spec.pull)
        configured = run_engine(engine, ["inspect", "--format", "{{.Config.WorkingDir}}", self.name]).decode().strip()
        self.workdir = spec.workdir or (configured if configured not in ("", "/") else FOLDER)
        self._script('mkdir -p -- "$1"', self.workdir, workdir="/")

    def metered_bytes(self, limits: Limits) -> int:
        return limits.memory_bytes + (limits.workspace_bytes if self._spec.read_only else 0)

    def run_arguments(self, image: str, limits: Limits) -> list[str]:
        spec, memory = self._spec, str(self.metered_bytes(limits))
        is_root = spec.user is None or spec.user.partition(":")[0] in ("0", "root")
        rights = NEEDED_RIGHTS if is_root else ()
        return [
            *(
                "run",
                "--detach",
                "--rm",
                "--pull",
                "never",
                "--name",
                self.name,
                "--label",
                f"{LABEL}={self._lease.id}",
            ),
            *("--hostname", "sandbox", "--network", "none", "--security-opt", "no-new-privileges"),
            *("--cap-drop", "ALL", *(part for right in rights for part in ("--cap-add", right))),
            *("--log-driver", "none", "--stop-signal", "KILL", "--workdir", "/"),
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.processes + SPARE_PROCESSES)),
            *(["--cpus", f"{spec.cpus:g}"] if spec.cpus is not None else []),
            *(["--user", spec.user] if spec.user is not None else []),
            *(self._read_only(limits) if spec.read_only else []),
            *(_get_ulimits() if self.engine == "podman" else []),
            *("--mount", f"type=bind,source={self._lease.path},target={LEASE_FILE},readonly"),
            *("--entrypoint", "sh", image, "-c", KEEPER, "sh", LEASE_FILE, str(math.ceil(self._lease.seconds) + 1)),
        ]

    def _read_only(self, limits: Limits) -> list[str]:
        places = {self._spec.workdir or FOLDER: limits.workspace_bytes, "/tmp": 64 * MEBIBYTE}
        sized = [f"{path}:rw,exec,nosuid,nodev,mode=1777,size={size}" for path, size in places.items()]
        options = ["--read-only", *(part for place in sized for part in ("--tmpfs", place))]
        return [*options, "--read-only-tmpfs=false"] if self.engine == "podman" else options

    def write(self, path: str, data: bytes) -> None:
        ended = self._script(WRITE, _to_relative(path), stdin=data)
        if ended.returncode != 0:
            raise ValueError(f"{path!r} cannot be written: {_format_error(ended)}")

    def read(self, path: str, max_bytes: int) -> bytes:
        ended = self._script(READ, _to_relative(path), str(max_bytes + 1))
        if ended.returncode == 4:
            raise FileNotFoundError(f"no file {path!r} in the working directory")
        if ended.returncode != 0:
            raise ValueError(f"{path!r} is not a readable regular file: {_format_error(ended)}")
        if len(ended.stdout) > max_bytes:
            raise ValueError(f"{path!r} is larger than {max_bytes} bytes")
        return ended.stdout

    def _script(
        self, script: str, *arguments: str, stdin: bytes = b"", workdir: str | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a script in the container. Raises InfraError if the container was removed or hangs."""
        command = self.exec_arguments("sh", "-c", script, "sh", *arguments, workdir=workdir)
        try:
            ended = subprocess.run(command, input=stdin, capture_output=True, timeout=CALL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InfraError(f"{self.engine} exec failed: {error}") from error
        if ended.returncode not in (0, 4, 5) and not self.runs():
            raise InfraError(f"the container {self.name} was removed: {_format_error(ended)}")
        return ended


class LeasedContainerSandbox(LeasedSandbox[Machine]):
    """See above. Memory and processes are limited for the container as a whole.

    Args:
        engine: None: the first available one.
    """

    python = "python3"

    def __init__(self, spec: RuntimeSpec, engine: EngineName | None) -> None:
        super().__init__(spec.limits)
        self._spec = spec
        self._engine: EngineName | None = engine

    @cached_property
    def kind(self) -> EngineName:
        """The engine. Raises InfraError if none is available."""
        return self._engine or find_engine()

    @property
    def workdir(self) -> str:
        return self._started().workdir

    def _make_workspace(self) -> Machine:
        return Machine(self._spec, self.kind, self.lease)

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        machine = self._started()
        bounds = (str(max(1, round(limits.cpu_seconds))), str(limits.file_bytes // BLOCK_BYTES))
        carriers, command_line = carried(env, command)
        argv = machine.exec_arguments("sh", "-c", LIMITED, "sh", *bounds, *command_line, passed=carriers)
        return Launch(argv, ContainerCommand(machine, uuid.uuid4().hex, alone=True), {**os.environ, **carriers})


def list_containers(lease: Lease) -> list[str]:
    """Return the containers of a lease. Raises InfraError."""
    listed = run_engine(_find_engine(lease), ["ps", "--all", "--quiet", "--filter", f"label={LABEL}={lease.id}"])
    return listed.decode().split()


def remove_containers(lease: Lease) -> None:
    """Raises InfraError."""
    if containers := list_containers(lease):
        run_engine(_find_engine(lease), ["rm", "--force", "--volumes", *containers])


def _find_engine(lease: Lease) -> EngineName:
    return "podman" if lease.kind == "podman" else "docker"


def _get_ulimits() -> list[str]:
    """Return options with this process's own limits: Podman asks for more, which it may lack the right to set."""
    options = []
    for name, which, most in (
        ("nofile", resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        ("nproc", resource.RLIMIT_NPROC, MAX_PROCESSES),
    ):
        _, own = resource.getrlimit(which)
        options += ["--ulimit", f"{name}={most if own == resource.RLIM_INFINITY else min(own, most)}"]
    return options


def _to_relative(path: str) -> str:
    return "./" + "/".join(split_path(path))


def _format_error(ended: "subprocess.CompletedProcess[bytes]") -> str:
    return ended.stderr.decode(errors="replace").strip()
