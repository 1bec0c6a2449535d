"""Round-robin queue over tenants for the rows of engines; first in, first out within a tenant.

A tenant may start requests while it holds less than `GREED` times the free rows (the native engine's rule,
`skyrl_train.inference_engines.native.waiting`, for requests of several rows). So early tenants never occupy all rows.
Independent of engines.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skyrl_train.inference_engines.native.waiting import GREED


class Turns:
    """
    Args:
        num_rows: sequences that all engines write at the same time
    """

    def __init__(self, num_rows: int):
        self._free = num_rows
        self._held: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def take(self, tenant: str, num_rows: int) -> AsyncIterator[None]:
        """Wait for rows and hold them until the end of the block. A request for more rows than are free gets them all
        the same, and later ones wait longer.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append((num_rows, turn))
        self._dispatch_waiting()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._free += num_rows
                self._held[tenant] -= num_rows
                self._held += Counter()  # removes zero counts
            self._dispatch_waiting()

    def _dispatch_waiting(self) -> None:
        while (tenant := self._find_next()) is not None:
            num_rows, turn = self._queues[tenant].popleft()
            self._queues.move_to_end(tenant)
            if not turn.cancelled():
                self._free -= num_rows
                self._held[tenant] += num_rows
                turn.set_result(None)

    def _find_next(self) -> str | None:
        for tenant in [tenant for tenant, queue in self._queues.items() if not queue]:
            del self._queues[tenant]
        return next((tenant for tenant in self._queues if self._held[tenant] < GREED * self._free), None)
