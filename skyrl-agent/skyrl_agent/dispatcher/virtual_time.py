"""Event loop whose clock leaps to the next timer, for deterministic tests and simulations of schedulers.

All awaited work must run in the loop: virtual time does not wait for threads, processes or sockets.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """No task is ready and no timer is set."""


class _LeapingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise Deadlock("deadlock: no task is ready and no timer is set")
        if not events and timeout:
            self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _LeapingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(work: Coroutine[object, None, T]) -> T:
    """Run a coroutine in virtual time (see `asyncio.run`)."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
