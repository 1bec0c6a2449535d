"""Cache of the adapters in an engine: loaded on request, evicted when slots are needed. Independent of sampling.

Folders are immutable, so a loaded adapter never becomes stale. At most `num_slots` are loaded at a time. Adapters
without a slot queue in the order of their first request. For each of them one adapter in use (the least recently
requested) stops accepting new requests: it drains, releases its slot, and may queue again. So the wait is bounded by
the requests in flight and ahead in the queue.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skyrl_train.errors import WorkerError
from skyrl_train.weight_sync.base import LoraLoadRequest


class Loader(Protocol):
    """Engine methods that load and unload adapters."""

    async def load_lora(self, request: LoraLoadRequest) -> Any: ...

    async def unload_lora(self, name: str) -> None: ...


@dataclass(eq=False)
class _Slot:
    """An adapter that is loaded or being loaded."""

    name: str
    loading: "asyncio.Task[None]"
    num_users: int = 0
    leaving: bool = False
    """Takes no new requests: somebody waits for its slot."""


class AdapterSlots:
    """Adapter cache of one engine, for use from one asyncio loop.

    Args:
        engine: must not receive adapters from other code
        num_slots: the engine's capacity
    """

    def __init__(self, engine: Loader, num_slots: int):
        self._engine = engine
        self._num_slots = num_slots
        self._slots: OrderedDict[Path, _Slot] = OrderedDict()
        """The one asked for longest ago first."""
        self._waiting: OrderedDict[Path, list[asyncio.Future[_Slot]]] = OrderedDict()

    @asynccontextmanager
    async def use(self, folder: Path | None) -> AsyncIterator[str | None]:
        """Yield the adapter's name in the engine, and hold its slot until the end of the block. None: the base model.

        Raises:
            ValueError: the adapter cannot be loaded; names folder and reason.
        """
        if folder is None:
            yield None
            return
        slot = await self._acquire(folder)
        try:
            await asyncio.shield(slot.loading)
            yield slot.name
        finally:
            self._release(slot)

    async def _acquire(self, folder: Path) -> _Slot:
        slot = self._slots.get(folder)
        if slot is not None and not slot.leaving:
            self._slots.move_to_end(folder)
            slot.num_users += 1
            return slot
        turn: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(folder, []).append(turn)
        self._dispatch_waiting()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._release(turn.result())
            elif folder in self._waiting and all(other.cancelled() for other in self._waiting[folder]):
                del self._waiting[folder]
                self._dispatch_waiting()
            raise

    def _release(self, slot: _Slot) -> None:
        slot.num_users -= 1
        self._dispatch_waiting()

    def _dispatch_waiting(self) -> None:
        """Assign free slots to waiting requests, then make further slots free if needed."""
        while self._waiting:
            folder = next(iter(self._waiting))
            slot = self._slots.get(folder)
            if slot is None and len(self._slots) >= self._num_slots and self._find_idle() is None:
                break
            turns = [turn for turn in self._waiting.pop(folder) if not turn.done()]
            if not turns:
                continue
            if slot is None:
                slot = self._open(folder)
            slot.num_users += len(turns)
            self._slots.move_to_end(folder)
            for turn in turns:
                turn.set_result(slot)
        num_leaving = sum(folder not in self._slots for folder in self._waiting)
        for index, slot in enumerate(sorted(self._slots.values(), key=lambda slot: not slot.leaving)):
            slot.leaving = index < num_leaving  # already leaving slots first, then the least recently requested

    def _find_idle(self) -> Path | None:
        """Return the least recently used idle adapter."""
        return next((folder for folder, slot in self._slots.items() if not slot.num_users), None)

    def _open(self, folder: Path) -> _Slot:
        former = None
        if len(self._slots) >= self._num_slots:
            idle = self._find_idle()
            assert idle is not None
            former = self._slots.pop(idle)
        slot = _Slot(str(folder), asyncio.create_task(self._load(folder, former)))
        self._slots[folder] = slot

        def remove_if_failed(loading: "asyncio.Task[None]") -> None:
            if (loading.cancelled() or loading.exception() is not None) and self._slots.get(folder) is slot:
                del self._slots[folder]
                self._dispatch_waiting()

        slot.loading.add_done_callback(remove_if_failed)
        return slot

    async def _load(self, folder: Path, former: _Slot | None) -> None:
        """Load the adapter, and evict another one if no slot is free."""
        if former is not None:
            await asyncio.wait([former.loading])
            if not former.loading.cancelled() and former.loading.exception() is None:
                await self._engine.unload_lora(former.name)
        await self._engine.load_lora(LoraLoadRequest(name=str(folder), path=str(folder), version=0))

    async def close(self) -> None:
        """Fail the requests that wait for a slot. Call it after the end of the engine, which ends running loads."""
        for turn in [turn for turns in self._waiting.values() for turn in turns if not turn.done()]:
            turn.set_exception(WorkerError("the engine is closed"))
        self._waiting.clear()
        await asyncio.gather(*(slot.loading for slot in self._slots.values()), return_exceptions=True)
