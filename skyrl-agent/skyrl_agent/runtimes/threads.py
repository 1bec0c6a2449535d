"""Blocking calls from async code: one daemon thread per call, so that hundreds can wait concurrently."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from skyrl_agent.errors import InfraError

T = TypeVar("T")


async def run_in_thread(seconds: float, function: Callable[..., T], *arguments: object) -> T:
    """Return the result of `function(*arguments)`. Cancelling the caller does not stop the call; its result is dropped.

    Raises:
        InfraError: it did not return within `seconds`, or no thread could be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    # Runs on the event loop, which owns the future: futures are not thread-safe, so the thread never touches it.
    # After a timeout or a cancellation the future is done already, and setting it would raise InvalidStateError.
    def deliver(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:  # passed on to the caller
            error = raised
        with suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(deliver, result, error)

    try:
        # A daemon thread, so that a call that never returns does not keep the interpreter from exiting.
        threading.Thread(target=work, name="skyrl-agent-runtime", daemon=True).start()
    except RuntimeError as error:
        raise InfraError(f"no thread for a runtime: {error}") from error
    try:
        # Unlike wait_for, wait does not raise at the timeout, so a TimeoutError raised by `function` itself is not
        # mistaken for ours.
        await asyncio.wait([future], timeout=seconds)
        if not future.done():
            name = getattr(function, "__qualname__", str(function))
            raise InfraError(f"{name} did not return within {seconds:g} s")
        return future.result()
    finally:
        future.cancel()
