"""Structured concurrency: helpers that wait for all their tasks and threads, and raise the first error."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from loguru import logger

T = TypeVar("T")


async def gather_or_cancel(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first error cancels the other calls and is raised."""
    with raise_first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


@asynccontextmanager
async def run_thread_during(function: Callable[[], object], purpose: str) -> AsyncIterator[None]:
    """Run `function` in a thread during the block, and wait for its end, even after an error or a cancellation: it is
    idle while the run ends.

    Args:
        purpose: purpose of the function, for the log.

    Raises:
        the error of the block (the function's error is then only logged), else the function's.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        yield
        await asyncio.shield(call)
    except BaseException as error:
        while not call.done():
            # A thread cannot be cancelled: further cancellations do not end the wait. The first error is raised.
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call])
        failure = None if call.cancelled() else call.exception()
        if failure is not None and failure is not error:
            logger.opt(exception=failure).error(f"{purpose} failed besides: {failure!r}")
        raise


@contextmanager
def raise_first_error() -> Iterator[None]:
    """Raise the first error of a task group by itself, with its original cause."""
    try:
        yield
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # `raise` has replaced it by the group
