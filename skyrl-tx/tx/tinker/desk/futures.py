"""Results: who waits for one, those not fetched yet in memory, all of them in the database.

A waiting poll costs a timer and a callback: no thread, no connection.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from sqlmodel import Session as Database

from tx.errors import RequestError
from tx.tinker.desk.live import Entry, Live
from tx.tinker.desk.results import StoredResult, TryAgain
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import ModelRow, RequestRow, SamplerRow
from tx.tinker.storage.store import Store

CACHE_BYTES = 32 << 20
"""Of results that nobody has fetched yet. One that was fetched is asked for again only where an answer was lost."""


class Futures:
    """
    Args:
        paused: why nothing is computed just now, or None
    """

    def __init__(self, store: Store, blobs: Blobs, live: Live, paused: Callable[[], str | None]):
        self._store, self._blobs, self._live, self._paused = store, blobs, live, paused
        self._cache: OrderedDict[str, tuple[str, StoredResult]] = OrderedDict()
        self._cached_bytes = 0
        self.delivered: dict[str, float] = {}
        """When results were given out, as far as no row says so yet."""

    async def retrieve(self, tenant: str, request_id: str, timeout: float) -> StoredResult | TryAgain:
        """
        Raises:
            RequestError: 404 unknown, 410 no longer kept
        """
        result = await self._find(tenant, request_id, timeout)
        if isinstance(result, StoredResult):
            self.delivered.setdefault(request_id, time.time())
            if (cached := self._cache.pop(request_id, None)) is not None:
                self._cached_bytes -= cached[1].size_bytes
        return result

    def publish(self, entry: Entry, result: StoredResult) -> None:
        """Gives a recorded result to those who wait, and keeps it for those who come soon."""
        self._cache[entry.request_id] = (entry.tenant, result)
        self._cached_bytes += result.size_bytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, (_, oldest) = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.size_bytes
        if not entry.finished.done():
            entry.finished.set_result(result)

    async def _find(self, tenant: str, request_id: str, timeout: float) -> StoredResult | TryAgain:
        if (entry := self._live.pending.get(request_id)) is not None:
            if entry.tenant != tenant:
                raise _unknown(request_id)
            return await self._wait(entry, timeout)
        if (cached := self._cache.get(request_id)) is not None:
            if cached[0] != tenant:
                raise _unknown(request_id)
            return cached[1]
        return await self._read(tenant, request_id)

    async def _wait(self, entry: Entry, timeout: float) -> StoredResult | TryAgain:
        await asyncio.wait((entry.finished,), timeout=timeout)
        if entry.finished.done():
            return entry.finished.result()
        reason = self._paused()
        return TryAgain(entry.request_id, "paused_capacity" if reason else "active", reason)

    async def _read(self, tenant: str, request_id: str) -> StoredResult | TryAgain:
        row = await self._store.read(partial(_row_or_gone, tenant=tenant, request_id=request_id))
        if row is None or row.tenant != tenant:
            raise _unknown(request_id)
        if row.status == "pending":  # being accepted or recorded at this moment
            await asyncio.sleep(0.05)
            return TryAgain(request_id)
        body = row.result
        if row.result_blob is not None:
            try:
                body = await asyncio.to_thread(self._blobs.get, row.result_blob)
            except FileNotFoundError:
                raise gone(request_id) from None
        if row.status == "done" and body is None:
            raise gone(request_id)
        return StoredResult(request_id, row.kind, body, row.error, row.category)


def _row_or_gone(database: Database, tenant: str, request_id: str) -> RequestRow | None:
    """The row; or 410 if there may have been one, which its id tells: `{model or sampler}:{seq}`."""
    if (row := database.get(RequestRow, request_id)) is not None:
        return row
    owner, _, seq = request_id.rpartition(":")
    if not seq.isdecimal() or len(seq) > 19:
        return None
    model, sampler = database.get(ModelRow, owner), database.get(SamplerRow, owner)
    if model is not None and model.tenant == tenant and int(seq) < model.next_seq:
        raise gone(request_id)
    if sampler is not None and sampler.tenant == tenant:  # clients submit a sample that is gone again
        raise gone(request_id)
    return None


def _unknown(request_id: str) -> RequestError:
    return RequestError(f"request_id {request_id[:200]!r} is not known", 404)


def gone(request_id: str) -> RequestError:
    return RequestError(f"the result of {request_id[:200]!r} is no longer kept", 410)
