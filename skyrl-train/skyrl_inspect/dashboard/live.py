"""Server-sent events about files that change."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.concurrency import run_in_threadpool

from skyrl_inspect.dashboard.runs_folder import NotBelowError

POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0


async def iter_change_events(look: Callable[[], object], poll_seconds: float = POLL_SECONDS) -> AsyncIterator[str]:
    """Yield an event at the start and whenever a value changes, and a heartbeat in between. Never ends by itself.

    Args:
        look: returns the value, in a thread; files that are absent give None.
    """
    last, quiet = None, 0.0
    is_first = True
    while True:
        try:
            now = await run_in_threadpool(look)
        except (NotBelowError, OSError):
            now = None
        if is_first or now != last:
            yield f"event: change\ndata: {time.time():.3f}\n\n"
            is_first, last, quiet = False, now, 0.0
        elif quiet >= HEARTBEAT_SECONDS:  # a closed page is noticed when something is sent
            yield ": alive\n\n"
            quiet = 0.0
        await asyncio.sleep(poll_seconds)
        quiet += poll_seconds
