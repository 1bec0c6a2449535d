"""Event loop in a separate thread, for asynchronous code called from synchronous code."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")

CANCEL_SECONDS = 5.0
"""Granted to a cancelled coroutine for its clean-up."""


class BackgroundLoop:
    """Event loop in a thread that runs coroutines for any number of threads. The thread is a daemon: it keeps no
    process alive.
    """

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[object, object, T]) -> "concurrent.futures.Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, some time soon. Does nothing once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[object, object, T], timeout: float) -> T:
        """Return the result of a coroutine. After `timeout` seconds it is cancelled. Raises TimeoutError."""
        if threading.current_thread() is self._thread:
            work.close()  # else Python warns that it was never awaited, and hides the error below
            raise RuntimeError("called from its own event loop, which would deadlock: use await instead")
        future = self.start(asyncio.wait_for(work, timeout))
        try:
            # `wait_for` cancels the coroutine at the deadline; the rest is for its clean-up.
            return future.result(timeout + CANCEL_SECONDS)
        except TimeoutError as failure:
            raise TimeoutError(str(failure) or f"no result within {timeout:g} seconds") from failure

    def close(self) -> None:
        """End the thread; what still runs is abandoned. May be called more than once."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CANCEL_SECONDS)
        if not self._thread.is_alive():  # else something blocks the loop; the thread is a daemon
            self._loop.close()


_shared: dict[int, BackgroundLoop] = {}
_shared_lock = threading.Lock()


def shared_loop() -> BackgroundLoop:
    """Return the loop shared by all asynchronous tools of this process. A forked child has no threads, and so makes
    another.
    """
    with _shared_lock:
        # By process id: a forked child inherits the entry of its parent, whose thread it does not have.
        if os.getpid() not in _shared:
            _shared[os.getpid()] = BackgroundLoop("tools")
        return _shared[os.getpid()]
