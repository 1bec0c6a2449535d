"""Interface of sandboxes for untrusted code, and the limits that hold in them. Independent of backends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Literal, Protocol, Self

MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of one command. Reaching a limit ends the command, with everything it started."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    """CPU time of one process."""
    memory_bytes: int = 1024 * MEBIBYTE
    """Address space of one process, and resident memory of all of the command's processes together."""
    output_bytes: int = MEBIBYTE
    """Size of standard output, and of standard error: further output is discarded and ends the command."""
    file_bytes: int = 64 * MEBIBYTE
    """Size of one file."""
    workspace_bytes: int = 256 * MEBIBYTE
    """Total size of the files in the workspace."""
    processes: int = 64
    """Maximum number of processes and threads at one time."""


Outcome = Literal["exited", "wall_time", "cpu_time", "memory", "output", "workspace"]
"""End of a command: by itself, or by the limit that it reached."""


@dataclass(frozen=True)
class ExecResult:
    """Result of a command. Output is text; bytes that are not UTF-8 become replacement characters."""

    outcome: Outcome
    returncode: int
    """Return code as of `subprocess`: a negative one is the signal that ended the command."""
    stdout: str
    stderr: str
    wall_seconds: float

    @property
    def ok(self) -> bool:
        """True if the command ended by itself with exit status 0."""
        return self.outcome == "exited" and self.returncode == 0


class SandboxProcess(Protocol):
    """A command that runs, to be talked to over its standard input and output. Its limits hold as for `exec`."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    """Unbuffered; not counted against `output_bytes`: who reads it bounds it."""

    def wait(self, timeout: float | None = None) -> ExecResult:
        """Wait for the end (`stdout` of the result is empty: it was read already). Raises TimeoutError."""
        ...

    def interrupt(self) -> None:
        """Send SIGINT to the command itself."""
        ...

    def kill(self) -> None:
        """End it and everything it started. May be called more than once."""
        ...


class Sandbox(Protocol):
    """Isolated environment for commands: separate file system and workspace, no network, resource limits.

    `start`, then any number of `exec` and `popen`, `write` and `read`, then `close`; or as a context manager. Commands
    start in the workspace, an initially empty folder that is visible only to them and `read` / `write`, and is deleted
    by `close`. When a command ends, its background processes are killed. Not thread-safe.

    Raises `InfraError` if the sandbox itself fails; a failing command is a result, not an exception.
    """

    limits: Limits
    python: str
    """Path, inside, of a Python 3 interpreter."""

    def start(self) -> None: ...

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        """Run a command to completion. `limits` override the sandbox's limits."""
        ...

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> SandboxProcess:
        """Start a command and return while it runs."""
        ...

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file of the workspace, with the folders it needs. Raises ValueError for a path outside."""
        ...

    def read(self, path: str) -> bytes:
        """Return a file of the workspace. Raises ValueError for a path outside (also by a link), FileNotFoundError."""
        ...

    def close(self) -> None:
        """End all commands and delete the workspace. May be called more than once."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...
