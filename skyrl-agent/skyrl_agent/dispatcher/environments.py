"""A fixed number of environments, each lent to one trajectory at a time. Knows no stages."""

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_agent.dispatcher.waits import before_deadline

logger = logging.getLogger(__name__)

MakeEnvironment = Callable[[int], Awaitable[Any]]
"""The number of the place, in [0, environments) -> what a trajectory gets as its `environment`."""
CloseEnvironment = Callable[[Any], Awaitable[None]]


class EnvironmentPool:
    """
    Args:
        count: places.
        make: called when a place is first needed, and after its environment was discarded; None: the environment is
            the place's number.
        close: of one environment.
        close_seconds: how long that may take.
    """

    def __init__(
        self, count: int, make: MakeEnvironment | None, close: CloseEnvironment | None, close_seconds: float
    ) -> None:
        self._make, self._close, self._close_seconds = make, close, close_seconds
        self._free = list(range(count))
        self._made: dict[int, Any] = {}
        self._leases: dict[int, object] = {}

    def take(self) -> int:
        """A free place; the caller sees to it that there is one. The lowest, which most likely has its environment."""
        place = heapq.heappop(self._free)
        self._leases[place] = object()
        return place

    async def environment(self, place: int) -> Any:
        if place not in self._made:
            lease = self._leases[place]
            made = await self._make(place) if self._make else place
            if self._leases.get(place) is not lease:  # it took so long that the trajectory was given up
                await self._end(made)
                raise TimeoutError(f"environment {place} was made too late, and closed again")
            self._made[place] = made
        return self._made[place]

    async def discard(self, place: int) -> None:
        """Closes the place's environment, if there is one: the next to ask gets a new one."""
        if place in self._made:
            await self._end(self._made.pop(place))

    async def give(self, place: int, broken: bool = False) -> None:
        del self._leases[place]
        if broken:
            await self.discard(place)
        heapq.heappush(self._free, place)

    async def close(self) -> None:
        await asyncio.gather(*(self.discard(place) for place in list(self._made)))

    async def _end(self, environment: Any) -> None:
        if self._close is None:
            return
        try:
            await before_deadline(_call(self._close, environment), self._close_seconds, self._close_seconds)
        except Exception:  # whatever it is, the other environments must be closed as well
            logger.warning("closing an environment failed; it may be left over: %r", environment, exc_info=True)


async def _call(function: CloseEnvironment, environment: Any) -> None:
    await function(environment)
