"""Interface of runtimes: an agent's machine with files and a shell. Independent of backends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from skyrl_gym.sandbox import ExecResult, Limits
from skyrl_gym.sandbox.container_engine import Pull

__all__ = ["ExecResult", "Limits", "Runtime", "RuntimeSpec", "Snapshot"]

RuntimeKind = Literal["auto", "local", "docker", "podman", "remote"]


@dataclass(frozen=True, kw_only=True)
class RuntimeSpec:
    """Specification of a runtime. One per instance, from the task file and the row."""

    kind: RuntimeKind = "auto"
    """`local`: bubblewrap, no daemon. `docker`, `podman`: a container of `image`. `remote`: a server of
    `python -m skyrl_agent.services.runtime` at `url`, which uses its own kind. `auto`: remote if there is a `url`, the
    first container engine that answers if there is an `image`, else what `skyrl_gym.sandbox.make_sandbox` chooses."""
    image: str | None = None
    """Container image (containers, and remote servers that use them)."""
    workdir: str | None = None
    """Working directory: a folder that the image brings, or a new one (containers, and remote servers that use them).
    None: an empty one of the runtime's own."""
    pull: Pull = "missing"
    """When a container's image is pulled: `always` (once in each process), if it is `missing`, or `never`."""
    user: str | None = None
    """User of a container, as `1000` or `1000:1000`; it then has no capability. None: the image's, with few of
    root's."""
    read_only: bool = False
    """Whether a container can write nothing but its working directory, then empty and in memory, and /tmp."""
    cpus: float | None = None
    """Processors that a container may use. None: all."""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Files written into the working directory at the start."""
    setup: tuple[str, ...] = ()
    """Shell commands run after that, in order; one that fails is an InfraError with its output."""
    env: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    """Symbolic links of a local runtime: absolute path -> target. Elsewhere a task makes them itself."""
    limits: Limits = field(default_factory=Limits)
    """Limits of each command, unless `exec` is given others."""
    lease_seconds: float = 60.0
    """Time without a sign of life of its owner after which a runtime is removed, whoever made it."""
    url: str | None = None
    token: str | None = None
    """Bearer token of a remote server."""
    snapshot: "Snapshot | None" = None
    """Start from the files of this snapshot instead of `files`."""


@dataclass(frozen=True)
class Snapshot:
    """The working directory at one time: a compressed tar, as every kind makes it; or the name of an image
    (containers)."""

    kind: Literal["tar", "image"]
    value: bytes | str


class Runtime(Protocol):
    """`start`, any use, `close`; or `async with`. Methods raise InfraError if the runtime itself fails or was removed;
    failures of commands never raise. One task at a time uses one runtime.

    While it is open a heartbeat keeps its lease. If its owner is killed (e.g. SIGKILL), it is removed when the lease
    expires.
    """

    id: str
    spec: RuntimeSpec
    workdir: str
    """Absolute, inside."""
    python: str
    """A Python 3 interpreter, inside."""

    async def probe(self) -> None:
        """Check within seconds that it could be started. Raises InfraError."""
        ...

    async def start(self) -> None: ...

    async def exec(
        self,
        command: str | list[str],
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a command in the working directory until it ends; a string is run by `bash -c`. `timeout` replaces
        `limits.wall_seconds` (and a smaller `limits.cpu_seconds`); the outcome of a timeout is `wall_time`. Cancelling
        the caller ends the command with all its child processes.
        """
        ...

    async def write(self, path: str, data: str | bytes) -> None:
        """Write a file, relative to the working directory. Raises ValueError for a path outside."""
        ...

    async def read(self, path: str) -> bytes:
        """Raises FileNotFoundError, ValueError for a path outside."""
        ...

    async def snapshot(self) -> Snapshot: ...

    async def close(self) -> None:
        """Kill all processes and remove all files. May be called more than once; never raises."""
        ...
