"""Request to end a run (SIGTERM, or a hook's), to which the run responds with a checkpoint."""

import asyncio
import signal
import threading
from typing import NoReturn

from loguru import logger


class StopRequest:
    """Request to end the run of the running event loop.

    After `accept`, a run checks `is_made`, or waits, and calls `end` when its checkpoint is complete. After the
    deadline, and at a second signal, KeyboardInterrupt ends it immediately.
    """

    def __init__(self) -> None:
        self._made = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None
        self._reason: Exception | None = None

    @property
    def is_made(self) -> bool:
        return self._made.is_set()

    def accept(self, timeout_seconds: float) -> None:
        """Accept requests until the loop is closed; the run then has `timeout_seconds`. 0: accept none."""
        if timeout_seconds and threading.current_thread() is threading.main_thread():  # signals arrive only there
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, self._receive, loop, timeout_seconds)

    def make(self, reason: Exception) -> None:
        """Request the end from within the run, which ends with this error, unless a signal was first."""
        if not self.is_made:
            self._reason = reason
            self._made.set()

    async def wait(self) -> None:
        """Return when a request is made."""
        await self._made.wait()

    def end(self) -> NoReturn:
        """End the run. Raises the reason given to `make`; after a signal KeyboardInterrupt."""
        if self._deadline is not None:
            self._deadline.cancel()
        raise KeyboardInterrupt if self._reason is None else self._reason

    def _interrupt(self) -> NoReturn:
        # Of the errors of a callback, the event loop passes on this one alone.
        raise KeyboardInterrupt

    def _receive(self, loop: asyncio.AbstractEventLoop, timeout_seconds: float) -> None:
        if self.is_made:
            self._interrupt()
        logger.warning(
            f"SIGTERM received: saving a checkpoint within {timeout_seconds:g} s (trainer.stop_timeout_seconds); a "
            "second SIGTERM stops the run immediately"
        )
        self._made.set()
        self._deadline = loop.call_later(timeout_seconds, self._interrupt)
