"""Gate before an engine: requests wait here, not in the engine's queue, while it is paused, asleep or updated."""

import asyncio
from typing import Literal

Reason = Literal["paused", "updating", "asleep"]


class Gate:
    """Gate that is open while there is no reason to be closed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._reasons: set[Reason] = set()
        self._waiting: set[asyncio.Future[bool]] = set()

    @property
    def is_open(self) -> bool:
        return not self._reasons

    def closed_for(self, reason: Reason) -> bool:
        return reason in self._reasons

    def close(self, reason: Reason) -> None:
        self._reasons.add(reason)

    def open(self, reason: Reason) -> None:
        """Remove a reason; without reasons, all waiting requests pass."""
        self._reasons.discard(reason)
        if self.is_open:
            self._answer(True)

    def dismiss(self) -> None:
        """Turn away all waiting requests."""
        self._answer(False)

    async def wait(self) -> bool:
        """Wait until the gate is open (True) or the wait was dismissed (False)."""
        while not self.is_open:
            future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                if not await future:
                    return False
            finally:
                self._waiting.discard(future)
        return True

    def _answer(self, may_go: bool) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(may_go)
        self._waiting.clear()
