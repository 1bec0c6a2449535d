"""Blocks with a thread or tasks beside them."""

import asyncio
import itertools
import threading

import pytest
from loguru import logger

from skyrl_gym.concurrency import raise_first_error
from skyrl_train.utils.async_blocks import run_thread_during


def test_block_error_is_raised_and_thread_error_logged():
    def write() -> None:
        raise OSError(28, "No space left on device")

    async def run(error: Exception | None) -> None:
        async with run_thread_during(write, "writing of step 3"):
            await asyncio.sleep(0.001)
            if error is not None:
                raise error

    lines: list[str] = []
    sink = logger.add(lines.append, level="ERROR")
    try:
        with pytest.raises(OSError, match="No space"):
            asyncio.run(run(None))
        assert lines == [], "an error that is raised is not logged besides"
        with pytest.raises(RuntimeError, match="the loss is NaN"):
            asyncio.run(run(RuntimeError("the loss is NaN")))
    finally:
        logger.remove(sink)
    assert len(lines) == 1 and "writing of step 3 failed as well: OSError(28" in lines[0]


@pytest.mark.parametrize("in_block", [True, False])
def test_twice_cancelled_block_waits_for_thread(in_block: bool):
    began, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        began.set()
        assert may_end.wait(10)
        has_ended.set()

    async def block() -> None:
        async with run_thread_during(write, "writing"):
            await asyncio.sleep(60 if in_block else 0)

    async def run() -> None:
        task = asyncio.ensure_future(block())
        await asyncio.to_thread(began.wait, 10)
        for _ in range(2):
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        was_over = task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not was_over and has_ended.is_set()

    asyncio.run(run())


def test_first_task_group_error_keeps_cause_and_context():
    async def fail(with_cause: bool) -> None:
        try:
            {}["table"]
        except KeyError as error:
            if with_cause:
                raise RuntimeError("my filter failed") from error
            raise RuntimeError("my filter failed")  # noqa: B904

    async def run(with_cause: bool, in_block: bool) -> None:
        with raise_first_error():
            async with asyncio.TaskGroup() as tasks:
                if in_block:
                    await fail(with_cause)
                tasks.create_task(fail(with_cause))

    for with_cause, in_block in itertools.product((True, False), repeat=2):
        with pytest.raises(RuntimeError, match="my filter failed") as raised:
            asyncio.run(run(with_cause, in_block))
        error = raised.value
        assert isinstance(error.__context__, KeyError), "not the group"
        assert error.__suppress_context__ == with_cause
        assert error.__cause__ is (error.__context__ if with_cause else None)
