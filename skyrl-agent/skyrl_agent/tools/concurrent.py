"""Concurrent awaitables that end together."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def gather_or_cancel(*waited: Awaitable[T]) -> list[T]:
    """Return all results. The first exception cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in waited]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
