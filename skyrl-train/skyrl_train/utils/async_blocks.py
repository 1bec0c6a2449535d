"""Asynchronous blocks that wait for their threads, and raise the first error."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from loguru import logger


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
            logger.opt(exception=failure).error(f"{purpose} failed as well: {failure!r}")
        raise
