"""Limits on concurrent trajectories, served by priority. Knows no trajectories."""

import asyncio
import heapq
import itertools


class PrioritySemaphore:
    """Semaphore that serves the lowest priority number first, and equal numbers in order of arrival.

    Args:
        limit: None: no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def acquire(self, priority: int) -> None:
        """Wait for a slot."""
        if self._free:
            self.used += 1
            return
        granted = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted and cancelled in the same step of the event loop
                self.release()
            raise

    def release(self) -> None:
        """Release a slot to the waiter of the lowest number."""
        self.used -= 1
        while self._waiting and self._free:
            granted = heapq.heappop(self._waiting)[2]
            if not granted.done():
                self.used += 1
                granted.set_result(None)

    @property
    def _free(self) -> bool:
        return self.limit is None or self.used < self.limit


class QueueLimit:
    """Limit of one stage: at most `parallel` trajectories run and `queue` more wait; further ones block upstream, where
    they keep their slot of the stage before (back-pressure).

    Args:
        parallel: None: no limit.
        queue: None: no limit.
    """

    def __init__(self, parallel: int | None, queue: int | None) -> None:
        self.running = PrioritySemaphore(parallel)
        self.admitted = PrioritySemaphore(None if parallel is None or queue is None else parallel + queue)

    async def enter_queue(self, priority: int) -> None:
        """Wait for admission."""
        await self.admitted.acquire(priority)

    async def enter_stage(self, priority: int) -> None:
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
