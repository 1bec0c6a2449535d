"""Limits on concurrent trajectories, served by priority. Independent of trajectories."""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any

Priority = Callable[[], Any]
"""() -> something ordered; the lowest is served first. Read when a wait begins, and some time after `update_order`."""
WAITERS_PER_CHANGE = 8
"""Priorities are read again after one change for each so many waiters: reading costs as much as there are waiters."""


class PrioritySemaphore:
    """Semaphore that serves the lowest priority first, and equal ones in order of arrival.

    Args:
        limit: None: no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: list[tuple[Any, int, Priority, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._num_changes = 0

    async def acquire(self, priority: Priority) -> None:
        """Wait for a slot."""
        if self.is_free:
            self.used += 1
            return
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority(), next(self._arrivals), priority, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted and cancelled in the same step of the event loop
                self.release()
            raise

    def release(self) -> None:
        """Release a slot to the waiter of the lowest priority."""
        self.used -= 1
        self._release_waiters()

    def set_limit(self, limit: int | None) -> None:
        """Change the limit. A lower one takes effect as slots are released."""
        self.limit = limit
        self._release_waiters()

    def update_order(self) -> None:
        """Note that priorities may have changed: they are read again before a slot is granted, with many waiters after
        several changes."""
        self._num_changes += 1

    @property
    def is_free(self) -> bool:
        return self.limit is None or self.used < self.limit

    def _release_waiters(self) -> None:
        if self._waiting and self.is_free and self._num_changes * WAITERS_PER_CHANGE >= len(self._waiting):
            self._num_changes = 0
            self._waiting = [(priority(), number, priority, wait) for _, number, priority, wait in self._waiting]
            heapq.heapify(self._waiting)
        while self._waiting and self.is_free:
            granted = heapq.heappop(self._waiting)[-1]
            if not granted.done():
                self.used += 1
                granted.set_result(None)


class QueueLimit:
    """Limit of one stage: at most `parallel` trajectories run and `queue` more wait; further ones block upstream, where
    they keep their slot of the stage before (back-pressure).

    Args:
        parallel: None: no limit.
        queue: None: no limit.
    """

    def __init__(self, parallel: int | None, queue: int | None) -> None:
        self.queue = queue
        self.running, self.admitted = PrioritySemaphore(None), PrioritySemaphore(None)
        self.set_limit(parallel)

    def set_limit(self, parallel: int | None) -> None:
        """Change the number of trajectories that run at a time."""
        self.running.set_limit(parallel)
        self.admitted.set_limit(None if parallel is None or self.queue is None else parallel + self.queue)

    async def wait_for_queue(self, priority: Priority) -> None:
        """Wait for admission."""
        await self.admitted.acquire(priority)

    async def wait_for_stage(self, priority: Priority) -> None:
        """Wait in the queue for a slot; leave the queue if cancelled."""
        try:
            await self.running.acquire(priority)
        except asyncio.CancelledError:
            self.admitted.release()
            raise

    def release(self) -> None:
        """Release slot and admission."""
        self.running.release()
        self.admitted.release()

    def update_order(self) -> None:
        """Note that priorities may have changed."""
        self.running.update_order()
        self.admitted.update_order()
