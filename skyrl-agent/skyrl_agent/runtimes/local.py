"""Places on this machine, made of the gym's sandboxes: bubblewrap, or plain processes for code that one trusts."""

import os
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import Limits
from skyrl_agent.runtimes.leases import Lease
from skyrl_gym.sandbox.command import Command
from skyrl_gym.sandbox.host import FilesType, HostSandbox
from skyrl_gym.sandbox.local import LocalSandbox
from skyrl_gym.sandbox.process import ProcessSandbox
from skyrl_gym.sandbox.workspace import PREFIX, Workspace

SPARE_BYTES = 1 << 20
"""A disk with less room than this is full."""
ROOM_BYTES = 1 << 16
"""Number of bytes that a command may add to a workspace that is already over its limit."""


class LeasedSandbox(HostSandbox[FilesType]):
    """Sandbox with a lease. Other threads may kill its commands."""

    kind: str
    workdir: str
    lease: Lease
    """Lease, taken before the sandbox is started."""

    def create_lease(self, id: str, seconds: float) -> Lease:
        """Raises InfraError."""
        self.lease = Lease.take(id, self.kind, seconds, self._folder(id))
        return self.lease

    def _folder(self, id: str) -> str:
        """Return the folder of its files on this machine; empty if they are elsewhere."""
        return ""

    def begin(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Command:
        """Start a command. Raises InfraError, and ValueError for arguments that no system can start."""
        return Command(self._launch(command, env, limits), limits)

    def full_disk(self) -> str | None:
        """Return the folder on a full disk (shared with the whole machine); None if the disk has space."""
        return None


class LeasedWorkspaceSandbox(LeasedSandbox[Workspace]):
    def _folder(self, id: str) -> str:
        return os.path.join(tempfile.gettempdir(), PREFIX + id)

    def begin(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Command:
        """Start a command, even if the workspace is over its limit: the command may be there to clean it up."""
        workspace = self._started()
        if workspace.usage(limits.workspace_bytes) > limits.workspace_bytes:
            limits = replace(limits, workspace_bytes=workspace.usage(sys.maxsize) + ROOM_BYTES)
        return super().begin(command, env, limits)

    def write(self, path: str, data: str | bytes) -> None:
        """Write a file. An existing file keeps its mode."""
        file = os.path.join(self._started().files, path)
        mode = None
        with suppress(OSError, ValueError):
            about = os.lstat(file)
            mode = stat.S_IMODE(about.st_mode) if stat.S_ISREG(about.st_mode) else None
        try:
            super().write(path, data)
            if mode is not None:
                os.chmod(file, mode)  # not a link: `write` rejects links
        except OSError as error:
            raise InfraError(f"{self._started().root} cannot be written: {error}") from error

    def full_disk(self) -> str | None:
        root = self._started().root
        about = os.statvfs(root)
        return root if about.f_bavail * about.f_frsize < SPARE_BYTES else None


class LeasedLocalSandbox(LocalSandbox, LeasedWorkspaceSandbox):
    kind, workdir = "local", "/workspace"

    def _make_workspace(self) -> Workspace:
        return Workspace(self._user, self.lease.folder)


class LeasedProcessSandbox(ProcessSandbox, LeasedWorkspaceSandbox):
    kind = "process"

    def _make_workspace(self) -> Workspace:
        return Workspace(root=self.lease.folder)

    @property
    def workdir(self) -> str:
        return self._started().files
