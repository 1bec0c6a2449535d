"""Waits with deadlines. Independent of trajectories."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

from skyrl_agent.errors import InfraError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_abandoned: set[asyncio.Task[object]] = set()
"""The event loop itself keeps tasks by weak references only."""


class DeadlineExceeded(TimeoutError):
    """End of a wait at its deadline.

    Args:
        abandoned: the work ignored its cancellation, and may still be running.
    """

    def __init__(self, abandoned: bool) -> None:
        super().__init__()
        self.abandoned = abandoned


async def wait_before_deadline(work: Coroutine[object, None, T], seconds: float | None, grace: float) -> T:
    """Return the result of `work`. Overdue work is cancelled, also when the caller is cancelled, and abandoned `grace`
    seconds later. Work that blocks the event loop cannot be stopped.

    Raises:
        DeadlineExceeded: `work` took longer than `seconds`.
        InfraError: a library within `work` cancelled it.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _stop(task, grace)
        raise
    if not task.done():
        await _stop(task, grace)
        raise DeadlineExceeded(abandoned=not task.done())
    if task.cancelled():
        raise InfraError("a library cancelled the task without a reason")
    return task.result()


async def wait_despite_cancellation(work: Coroutine[object, None, T]) -> T:
    """Await work that limits its own time, then raise any cancellation of the caller."""
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


async def _stop(task: asyncio.Task[object], grace: float) -> None:
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_log_abandoned_error)
    await wait_despite_cancellation(_wait(task, grace))
    if not task.done():
        logger.warning("abandoned after %g s because it ignored its cancellation: %r", grace, task)


async def _wait(task: asyncio.Task[object], seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)


def _log_abandoned_error(task: asyncio.Task[object]) -> None:
    _abandoned.discard(task)
    if not task.cancelled() and (error := task.exception()):  # asking marks it as seen
        logger.debug("raised after its cancellation: %r", error)
