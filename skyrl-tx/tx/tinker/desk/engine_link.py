"""The engine process, as the API has it: started, watched, started again when it dies or hangs.

Knows nothing of models and requests: what was sent to a dead engine is for those to send again who sent it (each start
is a new `life`).
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

from tx.tinker.backends.base import BackendInfo
from tx.tinker.desk.standby import Standby, signal_session, start_process
from tx.tinker.engine.channel import ApiChannel
from tx.tinker.engine.messages import FromApi, FromEngine, Pulse, Ready
from tx.tinker.engine.process import WRONG_SETTINGS

log = logging.getLogger(__name__)
engine_log = logging.getLogger("tx.engine")

LOG_TAIL_LINES = 100


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds."""

    start: float = 1800.0
    """Until an engine is ready: it may have to read a large model."""
    silence: float = 180.0
    """Without a word of an engine that was ready, which says something each second: then it hangs."""
    turn: float = 1800.0
    """For one pass of the training thread, or one step of sampling."""
    stop: float = 10.0
    """For an engine that was asked to end."""
    first_delay: float = 0.2
    """Before the first new start; doubled for each engine that died without having done anything."""
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
        patience: Patience | None = None,
        *,
        standby: bool = False,
    ):
        self._command, self._folder, self._patience = command, folder, patience or Patience()
        self._standby = Standby(command) if standby else None
        self.life = 0
        """Number of the present engine, or of the last one."""
        self.ready = False
        self.info: BackendInfo | None = None
        self.pulse: Pulse | None = None
        self.deaths = 0
        self.last_death: str | None = None
        self.trouble: str | None = "the engine is starting"
        """Why nothing is computed just now."""
        self.hopeless = asyncio.Event()
        """No new start will help: its settings are wrong."""
        self.log_tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)
        self._informed = asyncio.Event()
        self._channel: ApiChannel | None = None
        self._process: asyncio.subprocess.Process | None = None
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
        """Begins in the background. After `on_ready` the engine of this `life` takes messages; `on_death` gets the
        reason, and the next start waits for it."""
        self._on_ready, self._on_message, self._on_death = on_ready, on_message, on_death
        for socket in self._folder.glob("engine-*.sock"):  # of servers that were killed; each has this folder alone
            socket.unlink(missing_ok=True)
        self._supervision = asyncio.create_task(self._supervise(), name="engine-supervision")

    async def send(self, message: FromApi) -> None:
        """To the present engine; into nothing if it is dead."""
        if self._channel is not None:
            await self._channel.send(message)

    async def known_info(self, timeout: float) -> BackendInfo | None:
        """What the backend says of itself; None if no engine has been ready within `timeout`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._informed.wait(), timeout)
        return self.info

    def did_something(self) -> None:
        """An order was finished: the engine is no hopeless case."""
        self._deaths_in_a_row = 0

    def kill(self, reason: str) -> None:
        """Ends the present engine; another follows."""
        self._kill_reason = reason
        self._signal(signal.SIGKILL)

    async def close(self) -> None:
        """Asks the engine to end, and ends it after a while if it does not."""
        if self._supervision is None:
            return
        supervision, self._supervision = self._supervision, None
        self._closing = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()  # it alone: its children are its own to end, once models are on disk
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), self._patience.stop)
        supervision.cancel()
        await asyncio.wait((supervision,))
        if self._standby is not None:
            await self._standby.close()

    # ---- supervision

    async def _supervise(self) -> None:
        while True:
            self.life += 1
            why = "it could not be started"
            try:
                why = await self._live()
            except OSError as error:
                why = f"{why}: {error}"
            finally:
                self.ready = False
                self._signal(signal.SIGKILL)
            if self._closing:
                return
            self.deaths, self.last_death = self.deaths + 1, why
            self._deaths_in_a_row += 1
            self.trouble = f"the engine is being restarted: {why}"
            log.error("engine %d ended: %s", self.life, why)
            try:
                await self._on_death(why)
            except Exception:  # whatever fails there, an engine is needed
                log.exception("after the end of engine %d", self.life)
            if self._process is not None and self._process.returncode == WRONG_SETTINGS:
                self.trouble = f"the engine cannot be started: {why}"
                self.hopeless.set()
                return
            exponent = min(self._deaths_in_a_row - 1, 10)
            await asyncio.sleep(min(self._patience.first_delay * 2**exponent, self._patience.longest_delay))

    async def _live(self) -> str:
        """One engine from start to end. Returns why it ended."""
        self._kill_reason = None
        channel = self._channel = ApiChannel.bind(self._folder)
        tasks: list[asyncio.Task[str]] = []
        try:
            self._heard_at = time.monotonic()
            process = self._process = await self._new_process(channel.address)
            reading = asyncio.create_task(self._read_log(process))
            tasks = [
                asyncio.create_task(self._ended(process, reading)),
                asyncio.create_task(self._listen(channel)),
                asyncio.create_task(self._watch()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return self._kill_reason or next(iter(done)).result()
        finally:
            self.ready = False
            self._channel = None
            for task in tasks:
                task.cancel()
            self._signal(signal.SIGKILL)
            if self._process is not None:
                await self._process.wait()
            channel.close()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _new_process(self, address: str) -> asyncio.subprocess.Process:
        if self._standby is not None and (process := await self._standby.take(address)) is not None:
            return process
        return await start_process(self._command(address))

    async def _ended(self, process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> str:
        code = await process.wait()
        await asyncio.wait((reading,), timeout=2)  # a grandchild may hold the pipe
        reading.cancel()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        last = next((line for line in reversed(self.log_tail) if line.strip()), "")
        return f"it ended with {how}" + (f": {last[-300:]}" if last else "")

    async def _listen(self, channel: ApiChannel) -> str:
        async for message in channel:
            self._heard_at = time.monotonic()
            match message:
                case Ready():
                    self.info = message.info
                    self.ready, self.trouble = True, None
                    self._informed.set()
                    log.info("engine %d is ready", self.life)
                    self._on_ready()
                    if self._standby is not None:
                        self._standby.prepare()
                case Pulse():
                    self.pulse = message
                    if stuck := self._stuck(message):
                        return stuck
                case _:
                    self._on_message(message)
        return "its channel was closed"

    def _stuck(self, pulse: Pulse) -> str | None:
        limit = self._patience.turn
        for what, seconds in (("a training pass", pulse.turn_seconds), ("a step of sampling", pulse.step_seconds)):
            if seconds > limit:
                return f"{what} took longer than {limit:g} s (--pass-timeout-seconds)"
        return None

    async def _watch(self) -> str:
        while True:
            await asyncio.sleep(min(1.0, self._patience.silence / 4))
            patience = self._patience.silence if self.ready else self._patience.start
            if time.monotonic() - self._heard_at > patience:
                return f"it said nothing for {patience:g} s" + ("" if self.ready else " after its start")

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = ""
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            rest = rest[-(1 << 16) :]
            for line in lines:
                self.log_tail.append(line)
                engine_log.info("%s", line)
        if rest:
            self.log_tail.append(rest)

    def _signal(self, number: int) -> None:
        signal_session(self._process, number)
