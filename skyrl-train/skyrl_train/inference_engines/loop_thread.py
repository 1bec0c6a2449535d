"""Event loop in a dedicated thread, for an object bound to one loop and callers in others."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class LoopStopped(Exception):
    """The event loop stopped before the coroutine finished."""


class LoopThread:
    """Thread that runs coroutines in its event loop."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def call(self, coroutine: Coroutine[None, None, T]) -> "asyncio.Future[T]":
        """Start a coroutine. Returns a future in the caller's running loop (`wrap_in_running_loop`)."""
        return wrap_in_running_loop(self.submit(coroutine))

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
        """Run a coroutine and block until it is done."""
        return self.submit(coroutine).result()

    def stop(self, timeout_seconds: float = 10.0) -> None:
        """Stop the thread and cancel its running tasks."""
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
    """Queue of calls to functions in other event loops, for one thread. Calls to the same loop are sent together, since
    waking a loop costs more than a call.
    """

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._calls

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._calls.setdefault(loop, []).append(call)

    def flush(self) -> None:
        """Make the added calls in their loops."""
        if not self._calls:
            return
        calls, self._calls = self._calls, {}
        # One wake-up per loop: each writes to a pipe and may release the interpreter lock.
        for loop, own in calls.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the caller has exited
                loop.call_soon_threadsafe(_run_all, own)


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:  # error of one caller; calls of other callers follow
            asyncio.get_running_loop().call_exception_handler({"message": f"{call} failed", "exception": error})


def wrap_in_running_loop(running: "Future[T]") -> "asyncio.Future[T]":
    """Wrap the future of a coroutine in another loop for the running loop. Cancelling it cancels the coroutine; it
    raises LoopStopped if the coroutine was cancelled in its own loop.
    """
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
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: no waiter is left
            loop.call_soon_threadsafe(deliver)

    running.add_done_callback(done)
    outcome.add_done_callback(lambda _: running.cancel())
    return outcome
