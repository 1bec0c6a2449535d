"""Supervision of the engine process: start, health checks, restart after a crash or a hang.

Callers send their messages again to the next engine; each start increments `engine_generation`.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

from skyrl_gym.waits import explanation, waiting
from tx.tinker.backends.base import BackendInfo
from tx.tinker.engine.channel import ApiChannel
from tx.tinker.engine.messages import EngineStats, FromApi, FromEngine, Ready
from tx.tinker.engine.process import WRONG_SETTINGS
from tx.tinker.service.standby import Standby, send_signal_to_session, start_process
from tx.tinker.types import ENGINE

log = logging.getLogger(__name__)
engine_log = logging.getLogger("tx.engine")

LOG_TAIL_LINES = 100


@dataclass(frozen=True, kw_only=True)
class EngineTimeouts:
    """Timeouts of the engine process, in seconds."""

    start: float = 1800.0
    """Start-up, including the load of a large model."""
    silence: float = 180.0
    """Longest silence of a ready engine, which sends statistics each second."""
    turn: float = 1800.0
    """One pass of the training thread, or one step of sampling."""
    stop: float = 10.0
    """Shutdown of an engine after SIGTERM."""
    first_delay: float = 0.2
    """Delay of the first restart; doubled for each engine that crashed without completing a command."""
    longest_delay: float = 30.0


class EngineLink:
    """
    Args:
        command: address of the channel -> what to run
        folder: for the channel's socket
        standby: keep the next engine's process ready
    """

    def __init__(
        self,
        command: Callable[[str], list[str]],
        folder: Path,
        timeouts: EngineTimeouts | None = None,
        *,
        standby: bool = False,
    ):
        self._command, self._folder, self._timeouts = command, folder, timeouts or EngineTimeouts()
        self.standby = Standby(command) if standby else None
        self.engine_generation = 0
        """Number of the present or last engine."""
        self.ready = False
        self.info: BackendInfo | None = None
        self.stats: EngineStats | None = None
        self.deaths = 0
        self.last_death: str | None = None
        self.trouble: str | None = "the engine is starting"
        """Reason why no command is executed at present, for clients."""
        self.fatal_config_error = asyncio.Event()
        """Set when the engine exits because of wrong settings."""
        self.log_tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._informed = asyncio.Event()
        self._channel: ApiChannel | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._heard_at = 0.0
        self._deaths_in_a_row = 0
        self._kill_reason: str | None = None
        self._closing = False

    def start(
        self,
        on_ready: Callable[[], None],
        on_message: Callable[[FromEngine], None],
        on_death: Callable[[str], Coroutine[None, None, None]],
    ) -> None:
        """Start the supervision task. The engine takes messages after `on_ready`; `on_death` gets the reason of a
        crash, as clients may read it, and the restart waits for it."""
        self._on_ready, self._on_message, self._on_death = on_ready, on_message, on_death
        for socket in self._folder.glob("engine-*.sock"):  # of servers that were killed; each has this folder alone
            socket.unlink(missing_ok=True)
        self._supervision = asyncio.create_task(self._run_engines(), name="engine-supervision")

    async def send(self, message: FromApi) -> None:
        """Send a message to the current engine; drop it without one."""
        if self._channel is not None:
            await self._channel.send(message)

    async def wait_for_info(self, timeout: float) -> BackendInfo | None:
        """Wait for the backend's description. Returns: None if no engine was ready within `timeout`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._informed.wait(), timeout)
        return self.info

    def reset_restart_delay(self) -> None:
        """Reset the restart delay after a completed command."""
        self._deaths_in_a_row = 0

    def kill(self, reason: str) -> None:
        """Kill the present engine; a restart follows."""
        self._kill_reason = reason
        self.send_signal(signal.SIGKILL)

    async def close(self) -> None:
        """Terminate the engine, and kill it after a timeout."""
        if self._supervision is None:
            return
        supervision, self._supervision = self._supervision, None
        # Before the engine ends: the supervision would start another one.
        self._closing = True
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()  # it alone: its children are its own to end, once models are on disk
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), self._timeouts.stop)
        supervision.cancel()
        await asyncio.wait((supervision,))
        if self.standby is not None:
            await self.standby.close()

    # ---- supervision

    async def _run_engines(self) -> None:
        while True:
            # Before the start: requests sent to earlier engines then differ from it, so callers send them again.
            self.engine_generation += 1
            why = "it could not be started"
            try:
                why = await self._run_engine()
            except OSError as error:
                why = f"{why}: {error}"
            if self._closing:
                return
            self.deaths, self.last_death = self.deaths + 1, why
            self._deaths_in_a_row += 1
            public = _remove_details(why)
            self.trouble = f"the engine is being restarted: {public}"
            log.error("engine %d ended: %s", self.engine_generation, why)
            try:
                await self._on_death(public)
            except Exception:  # broad: whatever fails there, an engine is needed
                log.exception("after engine %d ended", self.engine_generation)
            if self.process is not None and self.process.returncode == WRONG_SETTINGS:
                self.trouble = f"the engine cannot be started: {public}"
                self.fatal_config_error.set()
                return
            # Bounded, because a float times 2**1024 is an OverflowError.
            exponent = min(self._deaths_in_a_row - 1, 10)
            await asyncio.sleep(min(self._timeouts.first_delay * 2**exponent, self._timeouts.longest_delay))

    async def _run_engine(self) -> str:
        """Run one engine until it exits. Returns: the reason."""
        self._kill_reason = None
        channel = self._channel = ApiChannel.bind(self._folder)
        tasks: list[asyncio.Task[str]] = []
        try:
            self._heard_at = time.monotonic()
            process = self.process = await self._start_process(channel.address)
            reading = asyncio.create_task(self._read_log(process))
            tasks = [
                asyncio.create_task(self._wait_for_exit(process, reading)),
                asyncio.create_task(self._read_messages(channel)),
                asyncio.create_task(self._check_liveness()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # After `kill` the process ends by SIGKILL; the reason given there says more than the signal.
            return self._kill_reason or next(iter(done)).result()
        finally:
            self.ready = False
            # From here on `send` drops messages: this engine will not read them.
            self._channel = None
            # No result of this engine may be taken once its death is reported, which counts the unfinished requests.
            for task in tasks:
                task.cancel()
            self.send_signal(signal.SIGKILL)
            if self.process is not None:
                await self.process.wait()
            channel.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_process(self, address: str) -> asyncio.subprocess.Process:
        if self.standby is not None and (process := await self.standby.take(address)) is not None:
            return process
        return await start_process(self._command(address))

    async def _wait_for_exit(self, process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> str:
        code = await process.wait()
        await asyncio.wait((reading,), timeout=2)  # a grandchild may hold the pipe
        reading.cancel()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        last = next((line for line in reversed(self.log_tail) if line.strip()), "")
        return f"it ended with {how}" + (f": {last[-300:]}" if last else "")

    async def _read_messages(self, channel: ApiChannel) -> str:
        with contextlib.ExitStack() as starting:
            starting.enter_context(waiting("the engine to be ready", on=ENGINE, deadline=self._timeouts.start))
            return await self._handle_messages(channel, starting.close)

    async def _handle_messages(self, channel: ApiChannel, when_ready: Callable[[], None]) -> str:
        async for message in channel:
            self._heard_at = time.monotonic()
            match message:
                case Ready():
                    when_ready()
                    self.info = message.info
                    self.ready, self.trouble = True, None
                    self._informed.set()
                    log.info("engine %d is ready", self.engine_generation)
                    self._on_ready()
                    # Not before: the imports of the next engine would slow down the start of this one.
                    if self.standby is not None:
                        self.standby.prepare()
                case EngineStats():
                    self.stats = message
                    if stuck := self._describe_stuck(message):
                        return stuck + await explanation(f"{stuck[0].upper()}{stuck[1:]}")
                case _:
                    self._on_message(message)
        return "its connection was closed"

    def _describe_stuck(self, stats: EngineStats) -> str | None:
        limit = self._timeouts.turn
        for what, seconds in (("a training pass", stats.turn_seconds), ("a sampling step", stats.step_seconds)):
            if seconds > limit:
                return f"{what} took longer than {limit:g} s (--pass-timeout-seconds)"
        return None

    async def _check_liveness(self) -> str:
        while True:
            await asyncio.sleep(min(1.0, self._timeouts.silence / 4))
            # Detects a hung event loop. With a hung training thread statistics still arrive: see `_describe_stuck`.
            timeouts = self._timeouts.silence if self.ready else self._timeouts.start
            if time.monotonic() - self._heard_at > timeouts:
                silent = f"it did not respond for {timeouts:g} s" + ("" if self.ready else " after startup")
                return silent + await explanation(f"the engine: {silent}")

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = ""
        # Read whatever happens: once the pipe is full, the engine blocks in its next line of log.
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            # A line that never ends must not grow without bound.
            rest = rest[-(1 << 16) :]
            for line in lines:
                self.log_tail.append(line)
                engine_log.info("%s", line)
        if rest:
            self.log_tail.append(rest)

    def send_signal(self, number: int) -> None:
        send_signal_to_session(self.process, number)


def _remove_details(why: str) -> str:
    """Return what clients may read: lines of the log and explanations, which follow the first colon, name paths of this
    machine and requests of others."""
    return why.partition(": ")[0]
