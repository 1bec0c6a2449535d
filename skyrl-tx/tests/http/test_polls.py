"""Long polls under way."""

import asyncio

import pytest

from tx.tinker.http.polls import OpenPolls


async def test_poll_gets_result():
    polls = OpenPolls()
    assert await polls.wait_for(asyncio.sleep(0, "done")) == "done"
    assert len(polls) == 0


async def test_closing_server_answers_all_polls_immediately():
    polls = OpenPolls()
    waiting = [asyncio.create_task(polls.wait_for(asyncio.sleep(60, "late"))) for _ in range(100)]
    await asyncio.sleep(0)
    assert len(polls) == 100
    polls.release()
    assert await asyncio.wait_for(asyncio.gather(*waiting), 5) == [None] * 100


async def test_externally_cancelled_poll_is_cancelled():
    polls = OpenPolls()
    waiting = asyncio.create_task(polls.wait_for(asyncio.sleep(60)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(polls) == 0
