"""Counted places, handed out by turn. Knows no trajectories."""

import asyncio
import heapq
import itertools


class Slots:
    """A semaphore that serves the lowest turn first, and equal turns in order of arrival.

    Args:
        limit: None: as many as ask.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    async def take(self, turn: int) -> None:
        if self._free:
            self.used += 1
            return
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # got it, and was cancelled before it knew
                self.give()
            raise

    def give(self) -> None:
        self.used -= 1
        while self._waiting and self._free:
            place = heapq.heappop(self._waiting)[2]
            if not place.done():
                self.used += 1
                place.set_result(None)

    @property
    def _free(self) -> bool:
        return self.limit is None or self.used < self.limit


class Gate:
    """A stage's slots with the queue before them: who has a place in the room waits for a slot or has one.

    Args:
        parallel: slots; None: no limit.
        queue: places beyond the slots; None: no limit.
    """

    def __init__(self, parallel: int | None, queue: int | None) -> None:
        self.slots = Slots(parallel)
        self.room = Slots(None if parallel is None or queue is None else parallel + queue)

    async def admit(self, turn: int) -> None:
        """To the queue. Until then the caller keeps what it holds of the stage before: this is the back-pressure."""
        await self.room.take(turn)

    async def start(self, turn: int) -> None:
        """From the queue to a slot; if cancelled, out of the queue."""
        try:
            await self.slots.take(turn)
        except asyncio.CancelledError:
            self.room.give()
            raise

    def leave(self) -> None:
        self.slots.give()
        self.room.give()
