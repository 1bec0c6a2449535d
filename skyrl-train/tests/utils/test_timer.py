import asyncio

import pytest

from skyrl_train.utils.timer import Timer


def test_seconds_accumulate_per_name():
    seconds = {"generate": 100.0}
    for _ in range(2):
        with Timer("generate", seconds):
            pass
    assert 100.0 < seconds["generate"] < 101.0


async def test_async_block_includes_waiting_time():
    seconds: dict[str, float] = {}
    async with Timer("wait", seconds):
        await asyncio.sleep(0.02)
    assert 0.02 <= seconds["wait"] < 5


def test_raising_block_is_timed():
    seconds: dict[str, float] = {}
    with pytest.raises(KeyError), Timer("fails", seconds):
        raise KeyError
    assert "fails" in seconds
