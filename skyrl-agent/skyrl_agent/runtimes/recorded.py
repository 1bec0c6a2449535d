"""Runtime that keeps a log of its commands, and records waits for it."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter

from skyrl_agent.errors import InfraError
from skyrl_agent.runtimes.base import ExecResult, Limits, Runtime, Snapshot
from skyrl_agent.types import SandboxCommand, Stage
from skyrl_gym.waits import waiting

logger = logging.getLogger(__name__)

MAX_COMMANDS = 300
"""Commands of a trajectory that its log holds, the first ones; an entry behind them counts the others."""

MAX_CHARACTERS = 2000
"""Length limit of a command and of each of its outputs in the log: of longer ones, beginning and end."""


class RecordedRuntime:
    """`Runtime` that appends its commands to a log.

    Args:
        inner: the runtime.
        log: of the trajectory.
    """

    stage: Stage = "initialize"
    """Stage of the trajectory, for the log."""

    def __init__(self, inner: Runtime, log: list[SandboxCommand]) -> None:
        self._inner, self._log = inner, log
        self.id, self.spec, self.workdir, self.python = inner.id, inner.spec, inner.workdir, inner.python
        self._place = inner.spec.url or ""

    async def probe(self) -> None:
        await self._inner.probe()

    async def start(self) -> None:
        with waiting("the runtime to start", on=self._place):
            await self._inner.start()
        self.id, self.workdir, self.python = self._inner.id, self._inner.workdir, self._inner.python

    async def exec(
        self,
        command: str | list[str],
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> ExecResult:
        text, began = command if isinstance(command, str) else " ".join(command), perf_counter()
        seconds = timeout or (limits or self.spec.limits).wall_seconds
        try:
            with waiting(f"command {text[:80]!r} in the runtime", on=self._place, deadline=seconds):
                result = await self._inner.exec(command, timeout=timeout, stdin=stdin, env=env, limits=limits)
        except InfraError as error:
            seconds = perf_counter() - began
            self._record_command(SandboxCommand(self.stage, text, "", str(error), "infrastructure", -1, seconds))
            raise
        end = (result.outcome, result.returncode, result.wall_seconds)
        self._record_command(SandboxCommand(self.stage, text, result.stdout, result.stderr, *end))
        return result

    async def write(self, path: str, data: str | bytes) -> None:
        with waiting("a file of the runtime", on=self._place):
            await self._inner.write(path, data)

    async def read(self, path: str) -> bytes:
        with waiting("a file of the runtime", on=self._place):
            return await self._inner.read(path)

    async def snapshot(self) -> Snapshot:
        return await self._inner.snapshot()

    async def close(self) -> None:
        with waiting("the runtime to close", on=self._place):
            await self._inner.close()

    def _record_command(self, entry: SandboxCommand) -> None:
        if len(self._log) < MAX_COMMANDS:
            names = ("command", "stdout", "stderr")
            self._log.append(replace(entry, **{name: clip(getattr(entry, name), MAX_CHARACTERS) for name in names}))
            return
        # Counted in the entry, as runtimes of one trajectory share the log.
        num_omitted = 1
        if len(self._log) == MAX_COMMANDS:
            logger.warning("runtime %s ran %d commands: its log does not record further ones", self.id, MAX_COMMANDS)
        else:
            num_omitted += int(self._log[-1].command.split()[1])
        note = f"[... {num_omitted} further commands omitted: the log records the first {MAX_COMMANDS} ...]"
        self._log[MAX_COMMANDS:] = [SandboxCommand(self.stage, note, "", "", "omitted", 0, 0.0)]


def clip(text: str, limit: int) -> str:
    """Shorten a text to `limit` characters and a note in the middle with the number of omitted ones."""
    missing = len(text) - limit
    if missing <= 0:
        return text
    head, tail = text[: (limit + 1) // 2], text[len(text) - limit // 2 :]
    return f"{head}\n[... {missing} characters left out ...]\n{tail}"
