"""Waits with a deadline and an owner. Independent of agents."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Time for cancelled work to clean up."""


class Pending:
    """Pending waits of one agent."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._ended = False

    async def before(self, seconds: float, work: Coroutine[object, None, T]) -> T:
        """Return the result of `work`. If the wait ends early, for whatever reason, `work` is cancelled; if it has not
        ended `GRACE_SECONDS` later, it is abandoned.

        Raises:
            TimeoutError: `work` took longer than `seconds`.
            InterruptedError: `work` cancelled itself, as libraries do that lose track of a cancellation.
        """
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._release)
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
        """Cancel all waits: each raises CancelledError."""
        self._ended = True
        for task in self._tasks:
            task.cancel()

    def _release(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report the exception of an abandoned task
