"""Standby process of the next engine: its imports are done, and it waits for the address of a channel.

It holds no model and uses no CPU while it waits; its cost is the memory of its imports.
"""

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable

from tx.tinker.engine.process import FROM_STDIN, STANDING_BY

log = logging.getLogger(__name__)


async def start_process(command: list[str], stdin: int = DEVNULL) -> Process:
    """Start a process in a new session: Ctrl-C in the terminal reaches only this process, which then terminates the
    other.
    """
    return await asyncio.create_subprocess_exec(
        *command, stdin=stdin, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )


def send_signal_to_session(process: Process | None, number: int) -> None:
    """Signal a process of `start_process` and its children, unless it has ended."""
    if process is not None and process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


class Standby:
    """Holder of at most one standby process.

    Args:
        command: address of a channel -> what to run as the engine
    """

    def __init__(self, command: Callable[[str], list[str]]):
        self._command = command
        self.process: Process | None = None
        self._waits = False
        self._making: asyncio.Task[None] | None = None

    def prepare(self) -> None:
        """Start a standby process in the background, unless one exists."""
        if self._making is None:
            self._making = asyncio.create_task(self._make(), name="standby-engine")

    async def take(self, address: str) -> Process | None:
        """Turn the standby process into the engine of this channel. Returns: None if none is ready."""
        process = self.process
        if process is None or not self._waits or process.returncode is not None:
            await self.close()
            return None
        self.process, self._making, self._waits = None, None, False
        assert process.stdin is not None
        process.stdin.write(f"{address}\n".encode())
        process.stdin.close()
        return process

    async def close(self) -> None:
        """Kill the standby process."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.wait((self._making,))
        process, self.process, self._making, self._waits = self.process, None, None, False
        send_signal_to_session(process, signal.SIGKILL)
        if process is not None:
            await process.wait()

    async def _make(self) -> None:
        try:
            process = self.process = await start_process(self._command(FROM_STDIN), stdin=PIPE)
        except OSError as error:
            log.warning("no standby engine: %s", error)
            return
        assert process.stdout is not None
        last = b""
        while line := await process.stdout.readline():
            if line.strip().decode(errors="replace") == STANDING_BY:
                self._waits = True
                return
            last = line
        log.warning("the standby engine ended: %s", last.decode(errors="replace").strip()[-300:])
