"""Saving of a run's checkpoints, one at a time, synchronously or in the background of training. Independent of
settings."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from loguru import logger

from skyrl_gym.waits import waiting
from skyrl_train.checkpoints import CheckpointStore
from skyrl_train.errors import CheckpointError
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.training_backends.checkpoint import WrittenFiles
from skyrl_train.utils.explanations import write_explanation
from skyrl_train.workers.worker import Worker

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds between polls of the ranks' files
_GRACE_SECONDS = 10.0
"""Wait of a run that has failed for the checkpoint that is being written."""


class CheckpointSaver:
    """Saver of the checkpoints of one run.

    Args:
        in_background: ranks copy their state and continue training while it is written (`trainer.ckpt_async`).
        timeout_seconds: maximum wait for a checkpoint written in the background (`trainer.worker_timeout_seconds`).
    """

    def __init__(self, store: CheckpointStore, *, in_background: bool, timeout_seconds: float):
        self._store = store
        self._in_background = in_background
        self._timeout_seconds = timeout_seconds
        self._step = 0
        self._task: asyncio.Task[None] | None = None

    async def save(
        self,
        step: int,
        groups: Sequence[ActorGroup],
        write_rest: Callable[[Path], Awaitable[None]],
        when_complete: Callable[[], None],
    ) -> None:
        """Save a checkpoint. In the background: return once the state of all ranks is copied.

        Args:
            groups: the models.
            write_rest: writes all files other than the models' into a folder.
            when_complete: called when the checkpoint is complete.

        Raises:
            CheckpointError: this or the previous checkpoint could not be written.
        """
        await self.wait()
        if not self._in_background:
            async with _run_in_threads(self._store.writing(step)) as draft:
                for group in groups:
                    reports = await group.call_all(Worker.save_checkpoint, str(draft.shared / group.name))
                    await asyncio.to_thread(draft.add, group.name, reports)
                await write_rest(draft.folder)
            when_complete()
            return

        copied = asyncio.Event()

        async def write() -> None:
            started = time.monotonic()
            async with _run_in_threads(self._store.writing(step)) as draft:
                for group in groups:
                    await group.call_all(Worker.start_checkpoint, str(draft.shared / group.name))
                await write_rest(draft.folder)
                copied.set()
                for group in groups:
                    await asyncio.to_thread(draft.add, group.name, await _wait_for_files(group))
            when_complete()
            logger.info(f"the checkpoint of step {step} is complete, after {time.monotonic() - started:.1f} s")

        self._step, self._task = step, asyncio.create_task(write())
        waiting = asyncio.create_task(copied.wait())
        await asyncio.wait([self._task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await self.raise_failure()

    async def wait(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete.

        Raises:
            CheckpointError: the write failed or timed out. The previous checkpoint is unchanged.
        """
        task, self._task = self._task, None
        if task is None:
            return
        deadline = asyncio.timeout(self._timeout_seconds)
        try:
            with waiting(f"the checkpoint of step {self._step}", deadline=self._timeout_seconds):
                async with deadline:
                    await task
        except TimeoutError:
            if not deadline.expired():
                raise
            late = (
                f"the checkpoint of step {self._step}, written in the background (trainer.ckpt_async), is not complete "
                f"after {self._timeout_seconds:g} s (trainer.worker_timeout_seconds)"
            )
            why = await asyncio.to_thread(write_explanation, late) or ": the disk or object store may be slow or full"
            raise CheckpointError(late + why) from None

    async def close(self) -> None:
        """Finish or abandon the pending checkpoint at the end of a run, also after a failure: a checkpoint whose files
        are written is completed, otherwise it is removed."""
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=_GRACE_SECONDS)
        task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        if outcome is not None:
            logger.warning(f"the run ended while the checkpoint of step {self._step} was being written: {outcome!r}")

    async def raise_failure(self) -> None:
        """Raise CheckpointError if the pending checkpoint has failed."""
        if self._task is not None and self._task.done():
            await self.wait()


async def _wait_for_files(group: ActorGroup) -> list[WrittenFiles]:
    """Wait until all ranks have written. Polls between their other calls, since they train meanwhile."""
    pause = _FIRST_PAUSE
    while True:
        reports = await group.call_all(Worker.checkpoint_files)
        if all(reports):
            return [report for report in reports if report is not None]
        await asyncio.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)


@asynccontextmanager
async def _run_in_threads(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and exit a context manager that does file I/O in threads."""
    value = await asyncio.to_thread(context.__enter__)
    try:
        yield value
    except BaseException as error:  # handled where the context ends
        # Not in a thread, since a cancelled task must not wait again.
        if not context.__exit__(type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(context.__exit__, None, None, None)
