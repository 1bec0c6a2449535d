"""Who may start now: requests wait here, not in an engine's queue, while it is paused, asleep or takes weights."""

import asyncio
from typing import Literal

Reason = Literal["paused", "updating", "asleep"]


class Gate:
    """Open while there is no reason to be closed. Belongs to one event loop."""

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
        """Takes the reason away; with the last one, everyone who waits may go."""
        self._reasons.discard(reason)
        if self.is_open:
            self._answer(True)

    def dismiss(self) -> None:
        """Sends away everyone who waits."""
        self._answer(False)

    async def wait(self) -> bool:
        """Returns when the gate is open: True. False: dismissed."""
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
