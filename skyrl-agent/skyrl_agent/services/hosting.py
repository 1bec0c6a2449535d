"""The runtimes that a server has for others: made, used and closed by id, each request as often as one likes."""

import asyncio
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes import make_runtime
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, RuntimeKind, RuntimeSpec, Snapshot
from skyrl_agent.runtimes.wire import NewCommand, NewRuntime

JANITOR_SECONDS = 0.25
RESULTS_KEPT = 8
IDS_KEPT = 100_000


class Full(Exception):
    """The server is at its limit of runtimes."""


class Gone(Exception):
    """Unknown runtime, or one that was closed."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Limits of a runtime server.

    Args:
        max_output_bytes: limit of each output stream of a command.
    """

    kind: RuntimeKind = "auto"
    max_runtimes: int = 64
    max_body_bytes: int = 512 << 20
    max_output_bytes: int = 16 << 20


@dataclass
class Hosted:
    """One runtime, from the request for it on."""

    runtime: Runtime
    starting: asyncio.Task[None]
    lease_seconds: float
    deadline: float
    commands: OrderedDict[str, asyncio.Task[ExecResult] | None] = field(default_factory=OrderedDict)
    """Commands by id; None for one whose result is no longer kept."""


class Host:
    """Host of the runtimes of a server."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self._hosted: dict[str, Hosted] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Ids of runtimes that were closed, and why: a late request must not make them again."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def num_runtimes(self) -> int:
        """Number of runtimes, including those that are being closed."""
        return len(self._hosted) + len(self._closing)

    def make(self, id: str, wishes: NewRuntime) -> Hosted:
        """Start a runtime, or find the existing one of that id. Raises Full, Gone."""
        if id in self._ended:
            raise Gone(self._ended[id])
        if id not in self._hosted:
            if self.num_runtimes >= self.settings.max_runtimes:
                raise Full(f"all {self.settings.max_runtimes} runtimes of this server are in use")
            spec = RuntimeSpec(
                kind=self.settings.kind,
                image=wishes.image,
                workdir=wishes.workdir,
                files=wishes.files,
                setup=wishes.setup,
                env=wishes.env,
                limits=self._clip_limits(wishes.limits),
                lease_seconds=max(wishes.lease_seconds, RuntimeSpec.lease_seconds),  # at least the default here
                snapshot=Snapshot("tar", wishes.snapshot) if wishes.snapshot is not None else None,
            )
            runtime = make_runtime(spec)
            deadline = time.monotonic() + wishes.lease_seconds
            task = asyncio.create_task(runtime.start())
            self._hosted[id] = Hosted(runtime, task, wishes.lease_seconds, deadline)
        return self.find(id)

    def find(self, id: str) -> Hosted:
        """Find a runtime and renew its lease. Raises Gone."""
        hosted = self._hosted.get(id)
        if hosted is None:
            raise Gone(self._ended.get(id, "unknown runtime id: it never existed, or this server was restarted"))
        hosted.deadline = time.monotonic() + hosted.lease_seconds
        return hosted

    def ready(self, id: str) -> Runtime:
        """Return a runtime that has started. Raises Gone, InfraError."""
        hosted = self.find(id)
        if not hosted.starting.done():
            raise InfraError("the runtime is not started yet")
        hosted.starting.result()
        return hosted.runtime

    def run(self, id: str, command_id: str, wishes: NewCommand) -> asyncio.Task[ExecResult]:
        """Start a command, or find the one of that id. Raises Gone, InfraError."""
        runtime, known = self.ready(id), self.find(id).commands
        if command_id not in known:
            if any(task is not None and not task.done() for task in known.values()):
                raise InfraError("a command is running in this runtime: one at a time")
            for old in list(known)[:-RESULTS_KEPT]:
                known[old] = None
            limits = self._clip_limits(wishes.limits or runtime.spec.limits)
            running = runtime.exec(
                wishes.command, timeout=wishes.timeout, stdin=wishes.stdin, env=wishes.env, limits=limits
            )
            known[command_id] = asyncio.create_task(running)
        return self.command(id, command_id)

    def command(self, id: str, command_id: str) -> asyncio.Task[ExecResult]:
        """Return a command by id. Raises Gone, InfraError."""
        known = self.find(id).commands
        task = known.get(command_id)
        if task is None:
            why = "its result has expired" if command_id in known else "no command has this id"
            raise InfraError(f"command {command_id}: {why}")
        return task

    async def cancel(self, id: str, command_id: str) -> None:
        """Kill a command. If it is unknown, record its id so that a late request does not start it."""
        task = self.find(id).commands.setdefault(command_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self, id: str, why: str = "the runtime was closed") -> None:
        """Close a runtime. May be called for any id."""
        if (closing := self._schedule_close(id, why)) is not None:
            await asyncio.shield(closing)

    async def keep(self) -> None:
        """Close runtimes with expired leases while the server runs."""
        while True:
            await asyncio.sleep(JANITOR_SECONDS)
            now = time.monotonic()
            for id, hosted in list(self._hosted.items()):
                if hosted.deadline < now:
                    why = f"the runtime was closed: no heartbeat of its owner for {hosted.lease_seconds:g} s"
                    self._schedule_close(id, why)

    async def close_all(self) -> None:
        """Close all runtimes."""
        for id in list(self._hosted):
            self._schedule_close(id, "the server is shutting down")
        if self._closing:
            await asyncio.wait(self._closing)

    def _schedule_close(self, id: str, why: str) -> asyncio.Task[None] | None:
        self._ended.setdefault(id, why)
        while len(self._ended) > IDS_KEPT:
            self._ended.popitem(last=False)
        hosted = self._hosted.pop(id, None)
        if hosted is None:
            return None
        task = asyncio.create_task(_close(hosted))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    def _clip_limits(self, limits: Limits) -> Limits:
        return replace(limits, output_bytes=min(limits.output_bytes, self.settings.max_output_bytes))


async def _close(hosted: Hosted) -> None:
    tasks = [hosted.starting, *(task for task in hosted.commands.values() if task is not None)]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):  # reported to the caller, if any
            task.result()
    await hosted.runtime.close()
