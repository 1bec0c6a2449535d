"""Waits that end, for work that may not. Knows no trajectories."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from skyrl_agent.errors import InfraError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_abandoned: set[asyncio.Task[Any]] = set()
"""The event loop itself keeps tasks by weak references only."""


class Overdue(TimeoutError):
    """The work did not end in time.

    Args:
        abandoned: it did not heed its cancellation either, and may still be running.
    """

    def __init__(self, abandoned: bool) -> None:
        super().__init__()
        self.abandoned = abandoned


async def before_deadline(work: Coroutine[Any, Any, T], seconds: float | None, grace: float) -> T:
    """What `work` returns or raises. Work that is late, or whose caller is cancelled, is cancelled; `grace` seconds
    later it is left to itself. (Work that blocks the event loop is beyond anyone's reach.)

    Raises:
        Overdue: after `seconds`.
        InfraError: the work was cancelled, but not by us: a library within it did that.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task, grace)
        raise
    if not task.done():
        await _stop(task, grace)
        raise Overdue(abandoned=not task.done())
    if task.cancelled():
        raise InfraError("it was cancelled from within: a library gave up without saying why")
    return task.result()


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that has deadlines of its own, through any cancellation of the caller, which is raised after it."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled
    return task.result()


async def _stop(task: asyncio.Task[Any], grace: float) -> None:
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)
    await to_the_end(_wait(task, grace))
    if not task.done():
        logger.warning("abandoned after %g s, as it does not heed its cancellation: %r", grace, task)


async def _wait(task: asyncio.Task[Any], seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled() and (error := task.exception()):  # asking marks it as seen
        logger.debug("raised after its cancellation: %r", error)
