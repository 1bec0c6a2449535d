"""Counts of the requests that a server runs, on the side of the remote engine."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class RunningRequests:
    """The requests that were sent to the server and are not answered, by adapter."""

    def __init__(self) -> None:
        self._counts: Counter[str | None] = Counter()
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return self._counts.total()

    @contextmanager
    def count_request(self, adapter: str | None) -> Iterator[None]:
        self._counts[adapter] += 1
        try:
            yield
        finally:
            self._counts[adapter] -= 1
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)

    async def wait_until_idle(self, adapter: str | None = None, *, of_any: bool = False) -> None:
        """Return when no request of `adapter` (with `of_any`: no request at all) is under way."""
        while len(self) if of_any else self._counts[adapter]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
