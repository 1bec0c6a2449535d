"""Structured concurrency for event loops."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def gather_or_cancel(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first error cancels the other calls and is raised."""
    with raise_first_error():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


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
