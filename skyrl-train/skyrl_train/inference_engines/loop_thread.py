"""Event loop in a thread of its own, for an object that belongs to one loop and callers in others."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class LoopStopped(Exception):
    """Error of a coroutine whose loop ended before it did."""


class LoopThread:
    """Thread that runs coroutines."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, coroutine: Coroutine[None, None, T]) -> "asyncio.Future[T]":
        """Start a coroutine for a caller in another loop. The future belongs to that loop; see `outcome_of`."""
        return outcome_of(self.submit(coroutine))

    def submit(self, coroutine: Coroutine[None, None, T]) -> "Future[T]":
        """Start a coroutine from any thread. After `stop` the future is cancelled."""
        if self._stopping:
            coroutine.close()
            stopped: Future[T] = Future()
            stopped.cancel()
            stopped.set_running_or_notify_cancel()
            return stopped
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_from_thread(self, coroutine: Coroutine[None, None, T]) -> T:
        """Block until it is done."""
        return self.submit(coroutine).result()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """End the thread; what still runs in it is cancelled."""
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


class LoopCalls:
    """Calls of functions in other event loops, for one thread: those of a loop leave together, as waking it costs more
    than a call."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._calls

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._calls.setdefault(loop, []).append(call)

    def flush(self) -> None:
        """Let the loops make the calls that were added."""
        if not self._calls:
            return
        calls, self._calls = self._calls, {}
        # One wake-up a loop: each writes to a pipe, and may cost the calling thread the interpreter's lock.
        for loop, own in calls.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_run_all, own)


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:  # the caller's own; other callers' calls follow
            asyncio.get_running_loop().call_exception_handler({"message": f"{call} failed", "exception": error})


def outcome_of(running: "Future[T]") -> "asyncio.Future[T]":
    """Return the future of a coroutine in another loop as one of this loop: cancelling it cancels the coroutine, and it
    raises LoopStopped where the coroutine was cancelled from the other side."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def deliver() -> None:
        if outcome.done():
            return
        if running.cancelled():
            outcome.set_exception(LoopStopped())
        elif (error := running.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(running.result())

    def done(_: "Future[T]") -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver)

    running.add_done_callback(done)
    outcome.add_done_callback(lambda _: running.cancel())
    return outcome
