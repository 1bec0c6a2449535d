"""Progress bar on standard error: finished trajectories, and the number in each stage."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

SECONDS = 0.5


@asynccontextmanager
async def show_progress(total: int, state: Callable[[], tuple[int, str]], enabled: bool) -> AsyncIterator[None]:
    """Show a progress bar.

    Args:
        total: number of trajectories.
        state: () -> (number of finished trajectories, text next to the bar), called twice a second.
    """
    if not enabled:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("", total=total)

        def show() -> None:
            done, text = state()
            bar.update(row, completed=done, description=text)

        async def follow() -> None:
            while True:
                show()
                await asyncio.sleep(SECONDS)

        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            show()
