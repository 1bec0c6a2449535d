"""Open long polls: requests that wait for a result."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


class OpenPolls:
    """Registry of open polls, so that a closing server can release them immediately. For one event loop."""

    def __init__(self):
        self._tasks: set[asyncio.Task] = set()
        self._released = False

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait_for(self, result: Awaitable[Result]) -> Result | None:
        """Wait for the result, or return None once `release` was called."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await result
        except asyncio.CancelledError:
            if not self._released:
                raise
            task.uncancel()
            return None
        finally:
            self._tasks.discard(task)

    def release(self) -> None:
        """End all waits."""
        self._released = True
        for task in self._tasks:
            task.cancel()
