"""Tenants share the rows of engines: none occupies all, and none starves."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tx.tinker.backends.skyrl_train.turns import Turns


class Line:
    """Requests that arrive in order, and hold their rows until released."""

    def __init__(self, num_rows: int):
        self._turns = Turns(num_rows)
        self.inside: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, num_rows: int = 1) -> None:
        """Names begin with the tenant's letter."""
        for name in names:
            self._leave[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._wait_until_present(name, num_rows))
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _wait_until_present(self, name: str, num_rows: int) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._turns.take(name[0], num_rows))
            self.inside.append(name)
            await self._leave[name].wait()
            self.inside.remove(name)

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_tenant_is_limited_to_75_percent_of_slots():
    line = Line(8)
    await line.come(*(f"a{number}" for number in range(8)))
    assert line.inside == ["a0", "a1", "a2", "a3", "a4", "a5"]  # six are three times two
    await line.come("b0")
    assert line.inside[-1] == "b0"
    await line.leave("a0")  # five are less than three times two
    assert line.inside[-1] == "a6"


async def test_tenants_take_turns():
    line = Line(1)
    await line.come("a0", "a1", "a2", "b0")
    for name, next_one in (("a0", "a1"), ("a1", "b0"), ("b0", "a2")):
        assert line.inside == [name]
        await line.leave(name)
        assert line.inside == [next_one]


async def test_request_of_more_rows_than_slots_is_admitted():
    line = Line(4)
    await line.come("a0", num_rows=64)
    await line.come("b0")
    assert line.inside == ["a0"]
    await line.leave("a0")
    assert line.inside == ["b0"]


async def test_cancelled_waiters_do_not_block_others():
    line = Line(1)
    await line.come("a0", "b0", "c0")
    line.tasks["b0"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await line.tasks["b0"]
    await line.leave("a0")
    assert line.inside == ["c0"]
    await line.leave("c0")
    await line.come("a1")
    assert line.inside == ["a1"]
