"""Results of requests: waiters, a cache of those not fetched yet, and the database for all others.

A waiting poll costs a timer and a callback: no thread, no connection.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from sqlmodel import Session as Database

from skyrl_gym.waits import waiting
from tx.errors import RequestError
from tx.tinker.service.results import StoredResult, TryAgain
from tx.tinker.service.state import PendingRequest, ServerState
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import ModelRow, RequestRow, SamplerRow
from tx.tinker.storage.store import Store
from tx.tinker.types import ENGINE

CACHE_BYTES = 32 << 20
"""Maximum total size of cached results that have not been fetched. A fetched result is requested again only if its
response was lost."""


class Futures:
    """
    Args:
        paused: returns the reason why no command is executed at present, or None
    """

    def __init__(self, store: Store, blobs: Blobs, state: ServerState, paused: Callable[[], str | None]):
        self._store, self._blobs, self._state, self._paused = store, blobs, state, paused
        self._cache: OrderedDict[str, tuple[str, StoredResult]] = OrderedDict()
        self._cached_bytes = 0
        self.delivered: dict[str, float] = {}
        """Times of delivery that are not written to their rows yet."""

    async def retrieve(self, tenant: str, request_id: str, timeout: float = 30.0) -> StoredResult | TryAgain:
        """Wait up to `timeout` seconds for a result.

        Raises:
            RequestError: 404 unknown, 410 expired
        """
        self._state.record_poll(tenant, request_id)
        result = await self._find(tenant, request_id, timeout)
        if isinstance(result, StoredResult):
            self.delivered.setdefault(request_id, time.time())
            if (cached := self._cache.pop(request_id, None)) is not None:
                self._cached_bytes -= cached[1].size_bytes
        return result

    def publish(self, pending: PendingRequest, result: StoredResult) -> None:
        """Hand a recorded result to its waiters, and cache it."""
        self._cache[pending.request_id] = (pending.tenant, result)
        self._cached_bytes += result.size_bytes
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, (_, oldest) = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.size_bytes
        if not pending.finished.done():
            pending.finished.set_result(result)

    async def _find(self, tenant: str, request_id: str, timeout: float) -> StoredResult | TryAgain:
        if (pending := self._state.pending.get(request_id)) is not None:
            if pending.tenant != tenant:
                raise _build_unknown_error(request_id)
            return await self._wait(pending, timeout)
        if (cached := self._cache.get(request_id)) is not None:
            if cached[0] != tenant:
                raise _build_unknown_error(request_id)
            return cached[1]
        return await self._read(tenant, request_id)

    async def _wait(self, pending: PendingRequest, timeout: float) -> StoredResult | TryAgain:
        with waiting(f"the result of {pending.kind} {pending.request_id}", on=ENGINE):
            await asyncio.wait((pending.finished,), timeout=timeout)
        if pending.finished.done():
            return pending.finished.result()
        reason = self._paused()
        return TryAgain(pending.request_id, "paused_capacity" if reason else "active", reason)

    async def _read(self, tenant: str, request_id: str) -> StoredResult | TryAgain:
        row = await self._store.read(partial(_get_row, tenant=tenant, request_id=request_id))
        if row is None or row.tenant != tenant:
            raise _build_unknown_error(request_id)
        if row.status == "pending":  # being accepted or recorded at this moment
            await asyncio.sleep(0.05)
            return TryAgain(request_id)
        body = row.result
        if row.result_blob is not None:
            try:
                body = await asyncio.to_thread(self._blobs.get, row.result_blob)
            except FileNotFoundError:
                raise build_expired_error(request_id) from None
        if row.status == "done" and body is None:
            raise build_expired_error(request_id)
        return StoredResult(request_id, row.kind, body, row.error, row.category)


def _get_row(database: Database, tenant: str, request_id: str) -> RequestRow | None:
    """Return the row. Raises: RequestError 410 if its id, `{model or sampler}:{seq}`, shows that there was one."""
    if (row := database.get(RequestRow, request_id)) is not None:
        return row
    owner, _, seq = request_id.rpartition(":")
    if not seq.isdecimal() or len(seq) > 19:
        return None
    model, sampler = database.get(ModelRow, owner), database.get(SamplerRow, owner)
    if model is not None and model.tenant == tenant and int(seq) < model.next_seq:
        raise build_expired_error(request_id)
    if sampler is not None and sampler.tenant == tenant:  # clients resubmit samples that were removed
        raise build_expired_error(request_id)
    return None


def _build_unknown_error(request_id: str) -> RequestError:
    return RequestError(f"request_id {request_id[:200]!r} is not known", 404)


def build_expired_error(request_id: str) -> RequestError:
    return RequestError(f"the result of {request_id[:200]!r} has expired", 410)
