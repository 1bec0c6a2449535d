"""What a remote engine knows of its requests on this side: who waits for the end of a pause, how many run."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class PauseGate:
    """Where requests wait while the engine is paused. Of one event loop."""

    def __init__(self) -> None:
        self._open = True
        self._waiting: set[asyncio.Future[bool]] = set()

    async def enter(self) -> bool:
        """Returns at once, or when the pause ends. False: the request was aborted while it waited."""
        while not self._open:
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                if not await future:
                    return False
            finally:
                self._waiting.discard(future)
        return True

    def close(self) -> None:
        self._open = False

    def open(self) -> None:
        self._open = True
        self._answer(True)

    def abort(self) -> None:
        """Ends the requests that wait."""
        self._answer(False)

    def _answer(self, answer: bool) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(answer)


class RunningRequests:
    """The requests that were sent to the server and are not answered, by adapter."""

    def __init__(self) -> None:
        self._counts: Counter[str | None] = Counter()
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return self._counts.total()

    @contextmanager
    def one_more(self, adapter: str | None) -> Iterator[None]:
        self._counts[adapter] += 1
        try:
            yield
        finally:
            self._counts[adapter] -= 1
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)

    async def until_none(self, adapter: str | None = None, *, of_any: bool = False) -> None:
        """Returns when no request of `adapter` (with `of_any`: no request at all) is under way."""
        while len(self) if of_any else self._counts[adapter]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
