"""Published names: waits for several coroutines, and blocking calls from a coroutine."""

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from skyrl_agent.runtimes.threads import run_in_thread

__all__ = ["GENERAL_TIMEOUT", "call_sync_from_async", "wait_all"]

T = TypeVar("T")

GENERAL_TIMEOUT = 15
"""Seconds."""


async def call_sync_from_async(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Run a blocking call in a separate thread and return its result."""
    return await run_in_thread(math.inf, functools.partial(function, *args, **kwargs))


async def wait_all(coroutines: Iterable[Coroutine[Any, Any, T]], timeout: float = GENERAL_TIMEOUT) -> list[T]:
    """Return the results of all. The first error, or the timeout, cancels the others.

    Raises:
        ExceptionGroup: errors of theirs.
        TimeoutError: they took longer than `timeout` seconds.
    """
    async with asyncio.timeout(timeout), asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]
