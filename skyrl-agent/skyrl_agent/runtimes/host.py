"""A runtime on this machine: a sandbox, a lease, and calls that block made from threads."""

import asyncio
import base64
import logging
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from skyrl_agent.errors import ConfigError, InfraError
from skyrl_agent.runtimes import heartbeat
from skyrl_agent.runtimes.base import ExecResult, Limits, RuntimeSpec, Snapshot
from skyrl_agent.runtimes.container import LeasedContainerSandbox
from skyrl_agent.runtimes.leases import Lease
from skyrl_agent.runtimes.local import LeasedLocalSandbox, LeasedProcessSandbox, LeasedSandbox
from skyrl_agent.runtimes.threads import run_in_thread
from skyrl_gym.sandbox import command as commands
from skyrl_gym.sandbox.backends import make_sandbox
from skyrl_gym.sandbox.command import END_SECONDS, TURN_SECONDS, Command, as_bytes
from skyrl_gym.sandbox.container import ContainerSandbox
from skyrl_gym.sandbox.container_engine import START_SECONDS, check_engine
from skyrl_gym.sandbox.host import NOT_STARTED
from skyrl_gym.sandbox.local import LocalSandbox

logger = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_SECONDS = 60.0
CALL_SECONDS = 120.0
"""Timeout of reading, writing and closing."""
MARGIN_SECONDS = 60.0
SNAPSHOT_SECONDS = 600.0
PACK = """
set -o pipefail
shopt -s dotglob nullglob
chmod -R u+rX . 2>/dev/null
entries=(./*)
tar -czf - "${entries[@]:--T/dev/null}" | base64
"""
"""Script that archives the content of the working directory. The folder itself is excluded: size checks change its mode
meanwhile, which tar would report as a change."""
UNPACK = ("tar", "-xpozf", "-")
SHOWN_CHARACTERS = 2000
"""Number of characters shown of the output of a setup command that failed."""


def make_leased_sandbox(spec: RuntimeSpec) -> LeasedSandbox[Any]:
    """
    Raises:
        ConfigError: a setting that this kind does not read.
        InfraError: that kind does not work on this machine.
    """
    if spec.kind == "docker" or spec.kind == "podman":
        return LeasedContainerSandbox(spec, spec.kind)
    if spec.kind == "auto" and spec.image:
        return LeasedContainerSandbox(spec, None)
    found = make_sandbox("auto" if spec.kind == "auto" else "local", limits=spec.limits)
    if isinstance(found, ContainerSandbox):
        return LeasedContainerSandbox(spec, found.engine)
    of_containers = {name: value for name in ("image", "user", "read_only", "cpus") if (value := getattr(spec, name))}
    if of_containers:
        named = ", ".join(f"runtime.{name}={value}" for name, value in of_containers.items())
        fix = "set runtime.kind to docker or podman" if spec.kind == "local" else "set runtime.image"
        raise ConfigError(
            f"{named} has an effect only for containers, and this runtime is not one: {fix}, or remove it"
        )
    if isinstance(found, LocalSandbox):
        return LeasedLocalSandbox(spec.limits, links=spec.links)
    return LeasedProcessSandbox(spec.limits)


def check_sandbox(spec: RuntimeSpec) -> None:
    """Raises InfraError if that kind does not work on this machine."""
    if isinstance(sandbox := make_leased_sandbox(spec), LeasedContainerSandbox):
        check_engine(sandbox.kind)


class HostRuntime:
    """A `Runtime`. Made by `make_runtime`."""

    workdir, python = "/workspace", "python3"

    def __init__(self, spec: RuntimeSpec) -> None:
        self.id = uuid.uuid4().hex
        self.spec = spec
        self._lease: Lease | None = None
        self._sandbox: LeasedSandbox[Any] | None = None
        self._command = _Command()
        self._closed = False
        self._lock = threading.Lock()
        """Held by whichever thread uses the sandbox."""

    async def probe(self) -> None:
        await run_in_thread(PROBE_SECONDS, check_sandbox, self.spec)

    async def start(self) -> None:
        try:
            await self._call(START_SECONDS + MARGIN_SECONDS, self._open)
            if self.spec.snapshot is not None and self.spec.snapshot.kind == "tar":
                await self._unpack(as_bytes(self.spec.snapshot.value))
            elif self.spec.snapshot is None:
                for path, data in self.spec.files.items():
                    await self.write(path, data)
            for command in self.spec.setup:
                _raise_if_failed(await self.exec(command), f"setup command {command!r}")
        except BaseException:
            await self.close()
            raise

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        limits = build_limits(limits or self.spec.limits, timeout)
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        # The command exists before its thread runs, so that a cancelled caller or `close` has something to cancel even
        # while the thread still waits for its turn or for the lock.
        self._command = running = _Command()
        seconds = TURN_SECONDS + limits.wall_seconds + 2 * END_SECONDS + MARGIN_SECONDS
        try:
            return await run_in_thread(
                seconds, self._run, running, argv, as_bytes(stdin), {**self.spec.env, **(env or {})}, limits
            )
        except asyncio.CancelledError:
            # Cancelling the await does not stop the thread: it would keep the lock until the command's own time limit.
            await run_in_thread(2 * END_SECONDS, running.cancel)
            raise

    async def write(self, path: str, data: str | bytes) -> None:
        await self._call(CALL_SECONDS, lambda: self._get_sandbox().write(path, data))

    async def read(self, path: str) -> bytes:
        return await self._call(CALL_SECONDS, lambda: self._get_sandbox().read(path))

    async def snapshot(self) -> Snapshot:
        """Return the working directory as a compressed tar."""
        result = await self.exec(PACK, limits=self._get_snapshot_limits())
        _raise_if_failed(replace(result, stdout=""), "a snapshot")
        return Snapshot("tar", await run_in_thread(CALL_SECONDS, base64.b64decode, result.stdout))

    async def close(self) -> None:
        self._closed = True
        try:
            await run_in_thread(CALL_SECONDS, self._close)
        except Exception as error:  # the lease is not renewed any more, so the cleanup removes the rest
            logger.warning("runtime %s could not be closed: %s", self.id, error)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _open(self) -> None:
        if self._sandbox is not None:
            raise InfraError(f"runtime {self.id} has already been started")
        sandbox = make_leased_sandbox(self.spec)
        heartbeat.heart.start_watcher()
        self._lease = sandbox.create_lease(self.id, self.spec.lease_seconds)
        # The lease is taken and renewed before the sandbox starts: if this process dies during the start, the lease
        # expires and others can remove what was created.
        heartbeat.heart.hold(self._lease)
        weakref.finalize(self, _release_lease, self._lease)
        # Assigned before `start`, so that `close` also cleans up a sandbox whose start failed halfway.
        self._sandbox = sandbox
        sandbox.start()
        self.workdir, self.python = sandbox.workdir, sandbox.python

    def _run(
        self, running: "_Command", argv: list[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> ExecResult:
        # The turn comes first: a thread that waits for it must not hold the lock, or `close` would wait as well.
        with commands.background.turn(), self._lock:
            result = running.run(self._get_sandbox(), argv, stdin, env, limits)
        if result.outcome == "exited" and result.returncode != 0 and (folder := self._get_sandbox().full_disk()):
            raise InfraError(f"the disk of {folder} is full")
        return result

    def _close(self) -> None:
        if self._lease is not None:
            # Dropped first, without the lock: if the rest of the shutdown hangs, the lease expires and others clean up.
            heartbeat.heart.drop(self._lease)
        # Cancelled before the lock is taken, because the thread that runs the command holds the lock until it ends.
        self._command.cancel()
        with self._lock:
            if self._sandbox is not None:
                self._sandbox.close()
            if self._lease is not None:
                _release_lease(self._lease)

    async def _unpack(self, archive: bytes) -> None:
        _raise_if_failed(
            await self.exec(list(UNPACK), stdin=archive, limits=self._get_snapshot_limits()), "restoring a snapshot"
        )

    def _get_snapshot_limits(self) -> Limits:
        """Return limits that fit the whole workspace in base64."""
        usual = self.spec.limits
        size = 2 * usual.workspace_bytes + (1 << 20)
        return replace(
            build_limits(usual, SNAPSHOT_SECONDS),
            output_bytes=size,
            workspace_bytes=size,
            processes=max(16, usual.processes),
        )

    async def _call(self, seconds: float, function: Callable[[], T]) -> T:
        def locked() -> T:
            with self._lock:
                if self._closed:
                    raise InfraError(f"runtime {self.id} is closed")
                return function()

        return await run_in_thread(seconds, locked)

    def _get_sandbox(self) -> LeasedSandbox[Any]:
        if self._closed or self._sandbox is None or self._lease is None:
            raise InfraError(f"runtime {self.id} is not started, or closed")
        if not self._lease.is_held:
            raise InfraError(f"runtime {self.id} expired: no heartbeat for {self._lease.seconds:g} s")
        return self._sandbox


class _Command:
    """One command, which another thread may end before it began or while it runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = False
        self._command: Command | None = None

    def run(
        self, sandbox: LeasedSandbox[Any], argv: list[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> ExecResult:
        with self._lock:
            if self._cancelled:
                raise InfraError("the command was cancelled before it started")
            try:
                self._command = command = sandbox.begin(argv, env, limits)
            except ValueError as error:  # invalid arguments: a NUL byte, or megabytes
                return ExecResult("exited", NOT_STARTED, "", f"{error}\n", 0.0)
        try:
            return command.communicate(stdin)
        finally:
            command.kill()
            with self._lock:  # its descriptors must not be reused during the wait
                command.close()

    def cancel(self) -> None:
        """Kill the command with all its children, and return when they have exited. May be called at any time."""
        with self._lock:
            self._cancelled = True
            if self._command is not None and not self._command.ended:
                self._command.kill()


def build_limits(limits: Limits, timeout: float | None) -> Limits:
    """Build limits with `timeout` for the wall clock; one process may compute for all of it."""
    if timeout is None:
        return limits
    return replace(limits, wall_seconds=timeout, cpu_seconds=max(timeout, limits.cpu_seconds))


def _raise_if_failed(result: ExecResult, what: str) -> None:
    if not result.ok:
        said = (result.stdout + result.stderr).strip()[-SHOWN_CHARACTERS:]
        raise InfraError(f"{what} failed ({result.outcome}, exit status {result.returncode}): {said}")


def _release_lease(lease: Lease) -> None:
    heartbeat.heart.drop(lease)
    lease.release()
