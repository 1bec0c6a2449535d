"""Waits that have a deadline and an owner. Knows no agent."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""What was cancelled may take so long to put things in order."""


class Pending:
    """What one agent waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    async def before(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the wait ends without it, for whatever reason, `work` is cancelled; where it does
        not heed that within `GRACE_SECONDS` it is left behind.

        Raises:
            TimeoutError: it took longer.
            InterruptedError: it cancelled itself, as libraries do that lose track of a cancellation.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
            if not done:
                raise TimeoutError(f"did not end within {seconds:g} s")
            if task.cancelled() and not self._ended:
                raise InterruptedError("was cancelled from within")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_SECONDS)

    def cancel(self) -> None:
        """Ends all waits: each raises CancelledError."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # of one that was left behind: read, so that asyncio does not report it
