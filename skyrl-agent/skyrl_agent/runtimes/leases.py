"""Leases of runtimes: one small file per runtime. Its modification time is the owner's last heartbeat."""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Self

from skyrl_agent.errors import InfraError
from skyrl_gym.sandbox.container_owner import process_start

FOLDER_VARIABLE = "SKYRL_AGENT_LEASES"
UNREADABLE_SECONDS = 60.0
"""Age from which an unreadable record no longer counts as one that is being written."""


def get_lease_folder() -> Path:
    """Return the folder of this user's leases (environment variable SKYRL_AGENT_LEASES)."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skyrl-agent" / "leases"


@dataclass(frozen=True)
class Lease:
    """Lease of one runtime.

    Args:
        process_start: start of process `pid` in clock ticks since boot; distinguishes it from a later process with the
            same pid.
        boot, namespace: boot and pid namespace in which `pid` is valid.
        folder: folder to remove; None for a container, which is labelled with the lease's id.
    """

    id: str
    kind: str
    seconds: float
    pid: int
    process_start: int | None
    host: str
    boot: str
    namespace: str
    path: Path
    folder: str = ""

    @classmethod
    def take(cls, id: str, kind: str, seconds: float, folder: str = "") -> Self:
        """Create a lease owned by this process. Its file is written before the resource is created.

        Raises:
            InfraError: it cannot be written.
        """
        path = get_lease_folder() / f"{id}.json"
        lease = cls(id, kind, seconds, os.getpid(), process_start(os.getpid()), *_get_host_identity(), path, folder)
        record = {name: value for name, value in asdict(lease).items() if name != "path"}
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(json.dumps(record))
        except OSError as error:
            raise InfraError(
                f"leases of runtimes cannot be written in {path.parent} ({error}): {FOLDER_HELP}"
            ) from error
        return lease

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a lease file. Raises FileNotFoundError, and ValueError for an invalid or incomplete file."""
        try:
            return cls(**json.loads(path.read_text()), path=path)
        except TypeError as error:
            raise ValueError(f"{path} is not a lease: {error}") from error

    def renew(self) -> None:
        with suppress(FileNotFoundError):  # the lease expired; calls of the runtime will report it
            now = time.time()  # local time, as a file server's clock may differ
            os.utime(self.path, (now, now))

    def release(self) -> None:
        """Delete the lease, as nothing is left to remove. May be called more than once."""
        if self.pid == os.getpid():  # not in a forked process
            self.path.unlink(missing_ok=True)

    @property
    def is_held(self) -> bool:
        """False once someone took it for left behind."""
        return self.path.exists()

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat. Raises FileNotFoundError."""
        return time.time() - self.path.stat().st_mtime

    @property
    def owner_ended(self) -> bool | None:
        """Whether the owner has exited; None if that cannot be determined (another machine or container)."""
        host, boot, namespace = _get_host_identity()
        if self.host != host:
            return None
        if self.boot != boot:
            return True
        return process_start(self.pid) != self.process_start if self.namespace == namespace else None

    def describe_abandonment(self) -> str | None:
        """Return why the lease is abandoned; None if it is in use. Raises FileNotFoundError."""
        if self.owner_ended:
            return f"its owner, process {self.pid}, has ended"
        return f"no heartbeat for {self.age:.0f} s" if self.age > self.seconds else None


FOLDER_HELP = f"set {FOLDER_VARIABLE} to a writable folder"


def leases() -> list[Lease]:
    """Return all leases of this user. Incomplete lease files are deleted."""
    found = []
    for path in sorted(get_lease_folder().glob("*.json")):
        with suppress(FileNotFoundError):
            try:
                found.append(Lease.read(path))
            except ValueError:
                if time.time() - path.stat().st_mtime > UNREADABLE_SECONDS:
                    path.unlink()
    return found


@cache
def _get_host_identity() -> tuple[str, str, str]:
    """Return the machine, its boot id and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), boot, os.readlink("/proc/self/ns/pid")
