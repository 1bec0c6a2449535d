"""Pool of a fixed number of environments, each used by one trajectory at a time. Independent of stages."""

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_agent.dispatcher.waits import wait_before_deadline

logger = logging.getLogger(__name__)

MakeEnvironment = Callable[[int], Awaitable[object]]
"""(index of the environment) -> the trajectory's `environment`."""
CloseEnvironment = Callable[[Any], Awaitable[None]]


class EnvironmentPool:
    """Pool of `count` environments, addressed by index.

    Args:
        make: called at the first use of an index, and after its environment was discarded; None: the environment is
            the index.
        close: closes one environment.
        close_seconds: deadline of `close`.
    """

    def __init__(
        self, count: int, make: MakeEnvironment | None, close: CloseEnvironment | None, close_seconds: float
    ) -> None:
        self._make, self._close, self._close_seconds = make, close, close_seconds
        self._free = list(range(count))
        self._environments: dict[int, object] = {}
        self._leases: dict[int, object] = {}

    def acquire(self) -> int:
        """Return the lowest free index, which most likely has its environment. The caller ensures that there is one."""
        index = heapq.heappop(self._free)
        self._leases[index] = object()
        return index

    async def environment(self, index: int) -> object:
        """Return the environment at `index`, created at first use."""
        if index not in self._environments:
            lease = self._leases[index]
            environment = await self._make(index) if self._make else index
            if self._leases.get(index) is not lease:  # the trajectory was abandoned meanwhile
                await self._close_one(environment)
                raise TimeoutError(f"environment {index} was created too late and closed again")
            self._environments[index] = environment
        return self._environments[index]

    async def discard(self, index: int) -> None:
        """Close the environment at `index`, if it exists; the next use creates another."""
        if index in self._environments:
            await self._close_one(self._environments.pop(index))

    async def release(self, index: int, broken: bool = False) -> None:
        """Return an index to the pool."""
        del self._leases[index]
        if broken:
            await self.discard(index)
        heapq.heappush(self._free, index)

    async def close(self) -> None:
        """Close all environments."""
        await asyncio.gather(*(self.discard(index) for index in list(self._environments)))

    async def _close_one(self, environment: object) -> None:
        if self._close is None:
            return
        try:
            await wait_before_deadline(_call(self._close, environment), self._close_seconds, self._close_seconds)
        except Exception:  # user code may raise anything; the other environments must be closed as well
            logger.warning("closing an environment failed; its resources may remain: %r", environment, exc_info=True)


async def _call(function: CloseEnvironment, environment: object) -> None:
    await function(environment)
