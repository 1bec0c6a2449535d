"""An asyncio loop in a thread of its own, for an object that belongs to one loop and callers that have others."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopStopped(Exception):
    """The loop ended before the coroutine did."""


class LoopThread:
    """Runs coroutines in its thread. A caller that is cancelled cancels its coroutine."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """
        Raises:
            LoopStopped: `stop` came first.
        """
        if self._stopping:
            coroutine.close()
            raise LoopStopped
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._stopping and caller is not None and not caller.cancelling():
                raise LoopStopped from None
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Start it from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_from_thread(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Blocks until it is done."""
        return self.submit(coroutine).result()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Ends the thread; what still runs in it is cancelled."""
        self._stopping = True
        if not self._thread.is_alive():
            return

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=timeout_seconds / 2) if tasks else None

        asyncio.run_coroutine_threadsafe(cancel_all(), self._loop).result(timeout_seconds)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._loop.close()
