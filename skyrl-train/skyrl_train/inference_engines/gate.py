"""Gate in front of an engine: while it is paused, asleep or updated, requests wait here instead of in its queue."""

import asyncio
from typing import Literal

Reason = Literal["paused", "updating", "asleep"]


class Gate:
    """Gate that is open while the set of reasons for closing it is empty. Belongs to one event loop."""

    def __init__(self) -> None:
        self._reasons: set[Reason] = set()
        self._waiting: set[asyncio.Future[bool]] = set()

    @property
    def is_open(self) -> bool:
        return not self._reasons

    def close_during(self, reason: Reason) -> bool:
        return reason in self._reasons

    def close(self, reason: Reason) -> None:
        self._reasons.add(reason)

    def open(self, reason: Reason) -> None:
        """Remove a reason; when none is left, all waiting requests pass."""
        self._reasons.discard(reason)
        if self.is_open:
            self._resolve_waiters(True)

    def dismiss(self) -> None:
        """Reject all waiting requests."""
        self._resolve_waiters(False)

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

    def _resolve_waiters(self, may_go: bool) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(may_go)
        self._waiting.clear()
