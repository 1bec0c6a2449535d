"""Base of sandboxes on this machine: a workspace folder, commands started from here, complete cleanup."""

import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, Self, TypeVar

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import command as commands
from skyrl_gym.sandbox.base import ExecResult, Limits, SandboxProcess
from skyrl_gym.sandbox.command import Command, Launch, as_bytes

NOT_STARTED = 126
"""Return code of what no system can start, as shells have it."""


class Files(Protocol):
    """Folder with the files of a sandbox."""

    def write(self, path: str, data: bytes) -> None: ...

    def read(self, path: str, max_bytes: int) -> bytes: ...

    def delete(self) -> None: ...


FilesType = TypeVar("FilesType", bound=Files)


class HostSandbox(Generic[FilesType]):
    """A `Sandbox` whose commands are children of this process. `_launch` defines their isolation."""

    python: str

    def __init__(self, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._workspace: FilesType | None = None
        self._running: set[Command] = set()

    def start(self) -> None:
        if self._workspace is None:
            try:
                self._workspace = self._make_workspace()
            except OSError as error:
                raise InfraError(f"cannot create a sandbox folder: {error}") from error
            self._finalizer = weakref.finalize(self, _clean, self._running, self._workspace, os.getpid())

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        limits = limits or self.limits
        with commands.background.turn():
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self) -> FilesType:
        if self._workspace is None:
            raise InfraError("the sandbox is not started, or closed")
        return self._workspace

    def _make_workspace(self) -> FilesType:
        raise NotImplementedError

    def _launch(self, command: Sequence[str], env: Mapping[str, str] | None, limits: Limits) -> Launch:
        raise NotImplementedError


def _clean(running: set[Command], workspace: Files, process: int) -> None:
    if os.getpid() != process:  # a forked process that ends: the sandbox is its parent's
        return
    for command in running:
        command.kill()
        with suppress(InfraError):  # for who still waits for it
            command.wait()
        command.close()
    running.clear()
    workspace.delete()
