"""Client-side count of a server's running requests."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class RunningRequests:
    """Number of requests in flight at the server, by adapter."""

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
        """Wait until no request of `adapter` (with `of_any`: no request at all) is in flight."""
        while len(self) if of_any else self._counts[adapter]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
