"""Order of adapter slot assignment and loading, with a real engine of two slots."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from tx.tinker.backends.torch.adapter_slots import AdapterSlots


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[NativeInferenceEngine]:
    engine = NativeInferenceEngine(str(tiny_model), max_loras=2, max_lora_rank=128)
    yield engine
    await engine.teardown()


@pytest.fixture
def slots(engine: NativeInferenceEngine) -> AdapterSlots:
    return AdapterSlots(engine, 2)


class User:
    """Request that uses an adapter until released."""

    def __init__(self, slots: AdapterSlots, folder: Path):
        self.goes = asyncio.Event()
        self.has_it = asyncio.Event()
        self.task = asyncio.create_task(self._use(slots, folder))

    async def _use(self, slots: AdapterSlots, folder: Path) -> None:
        async with slots.use(folder):
            self.has_it.set()
            await self.goes.wait()

    async def starts(self) -> "User":
        async with asyncio.timeout(10):
            await self.has_it.wait()
        return self

    async def waits(self) -> "User":
        await asyncio.sleep(0.1)
        assert not self.has_it.is_set()
        return self

    async def leaves(self) -> None:
        self.goes.set()
        await self.task


def loaded(engine: Any) -> set[str]:
    return set(engine._core.loras._by_name)


def num_loads(engine: Any) -> int:
    return engine._core.loras._serials


async def test_new_adapter_is_loaded_once_for_many_requests_and_stays(engine, slots, adapter):
    users = [User(slots, adapter(1)) for _ in range(20)]
    for user in users:
        await user.starts()
    assert num_loads(engine) == 1 and loaded(engine) == {str(adapter(1))}
    for user in users:
        await user.leaves()
    again = await User(slots, adapter(1)).starts()
    assert num_loads(engine) == 1
    await again.leaves()


async def test_adapter_slots_evict_least_recently_used_but_none_in_use(engine, slots, adapter):
    first, second, third = adapter(1), adapter(2), adapter(3)
    used = await User(slots, first).starts()
    await (await User(slots, second).starts()).leaves()
    await (await User(slots, third).starts()).leaves()  # in place of the second: the first is in use
    assert loaded(engine) == {str(first), str(third)}
    await used.leaves()
    await (await User(slots, first).starts()).leaves()
    await (await User(slots, second).starts()).leaves()
    assert loaded(engine) == {str(first), str(second)}


async def test_waiting_adapters_get_slots_in_arrival_order(engine, slots, adapter):
    users = [await User(slots, adapter(index)).starts() for index in (1, 2)]
    third, fourth = await User(slots, adapter(3)).waits(), await User(slots, adapter(4)).waits()
    await users[1].leaves()
    await third.starts()
    await fourth.waits()
    await users[0].leaves()
    await fourth.starts()
    assert loaded(engine) == {str(adapter(3)), str(adapter(4))}
    for user in (third, fourth):
        await user.leaves()


async def test_busy_adapter_releases_slot_to_waiting_adapters(engine, slots, adapter):
    """Two adapters are in constant use and a third waits; one of the two drains, and is requested again later."""
    busy = await User(slots, adapter(1)).starts()
    others = await User(slots, adapter(2)).starts()
    third = await User(slots, adapter(3)).waits()
    late = await User(slots, adapter(1)).waits()  # after the third, although its adapter is loaded
    at_once = await User(slots, adapter(2)).starts()  # only one adapter has to go
    await busy.leaves()
    await third.starts()
    for user in (others, at_once):
        await user.leaves()
    await late.starts()
    for user in (late, third):
        await user.leaves()


async def test_adapter_stays_when_waiting_request_is_cancelled(engine, slots, adapter):
    users = [await User(slots, adapter(index)).starts() for index in (1, 2)]
    third = await User(slots, adapter(3)).waits()
    late = await User(slots, adapter(1)).waits()
    third.task.cancel()
    await late.starts()
    assert num_loads(engine) == 2
    for user in (*users, late):
        await user.leaves()


async def test_cancelled_waiters_leave_no_trace(engine, slots, adapter):
    users = [await User(slots, adapter(index)).starts() for index in (1, 2)]
    gone = [User(slots, adapter(3)) for _ in range(3)]
    stays = await User(slots, adapter(4)).waits()
    for user in gone:
        user.task.cancel()
    await users[0].leaves()
    await stays.starts()
    gone = [User(slots, adapter(5)) for _ in range(3)]  # given up while their turn comes
    await asyncio.sleep(0)
    users[1].goes.set()
    await users[1].task
    for user in gone:
        user.task.cancel()
    await asyncio.sleep(0.1)
    await (await User(slots, adapter(6)).starts()).leaves()
    await stays.leaves()
    assert not slots._waiting and all(slot.num_users == 0 for slot in slots._slots.values())


async def test_adapter_storm_serves_every_request(engine, slots, adapter):
    async def use(index: int) -> None:
        for turn in range(4):
            folder = adapter((index * 7 + turn * 3) % 9)
            async with slots.use(folder) as name:
                assert name in loaded(engine)
                await asyncio.sleep(0.001 * (index % 4))
                assert name in loaded(engine)

    async with asyncio.timeout(60):
        await asyncio.gather(*(use(index) for index in range(40)))
    assert not slots._waiting and len(slots._slots) <= 2
