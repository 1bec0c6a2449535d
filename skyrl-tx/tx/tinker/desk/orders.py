"""Accepting what changes a model: once each, durable before it is answered, in the order of seqs.

A request is known by its model and seq. The same again gets the same id, whatever it holds this time: clients repeat a
request only byte for byte. A refused one (4xx) uses up its seq; one that comes too often (429) does not.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session as Database

from tx.errors import RequestError
from tx.tinker.desk.dispatch import Dispatch
from tx.tinker.desk.limits import Limits
from tx.tinker.desk.live import Entry, Live, Run, request_id_of
from tx.tinker.desk.records import Record
from tx.tinker.desk.rows import fail_entries, insert_entry, insert_refusal
from tx.tinker.desk.sequencer import FURTHEST_AHEAD
from tx.tinker.engine.messages import Unload
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.store import Store, StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A request that was checked."""

    kind: str
    record: Record
    payload: bytes | None = None
    """The bytes of a large `Train`, to be kept beside the record."""


Prepare = Callable[[Run, str], Awaitable[Prepared]]
"""Checks a request of this run with this request id. Raises RequestError."""


Insert = Callable[[Database, Entry], None]
"""Writes a request down."""


class Orders:
    def __init__(self, store: Store, blobs: Blobs, live: Live, limits: Limits, dispatch: Dispatch):
        self._store, self._blobs, self._live, self._limits, self._dispatch = store, blobs, live, limits, dispatch

    async def create(self, run: Run, record: Record, insert: Insert) -> None:
        """The first request of a new model, which `insert` writes down with it."""
        self._track(run, 0, self._create(run, record, insert))
        await self.created(run)

    async def created(self, run: Run) -> None:
        """Returns once the model's creation is durable."""
        if (deciding := run.deciding.get(0)) is not None:
            await asyncio.shield(deciding)

    async def accept(self, tenant: str, model_id: str, seq: int, prepare: Prepare) -> dict[str, str]:
        """Returns once the request is durable.

        Raises:
            RequestError: the model is not there, or the request is wrong; the latter uses up its seq.
            Busy: later.
        """
        run = self._live.run(tenant, model_id)
        if (deciding := run.deciding.get(seq)) is None and not run.sequence.knows(seq):
            if run.sequence.too_far(seq):
                expected = run.sequence.next_seq
                raise RequestError(f"seq_id must be {expected} to {expected + FURTHEST_AHEAD} by now; got {seq}")
            if seq != run.sequence.next_seq:  # that one is what others wait for
                self._limits.admit_training(tenant)
            deciding = self._track(run, seq, self._decide(run, seq, prepare))
        if deciding is not None:
            await asyncio.shield(deciding)
        elif seq in run.refused:
            raise run.refused[seq]
        return {"request_id": request_id_of(model_id, seq), "model_id": model_id}

    async def refuse(self, tenant: str, model_id: str, seq: int, error: str) -> None:
        """Notes that a request was refused elsewhere."""
        run = self._live.runs.get(model_id)
        if run is None or run.tenant != tenant or run.sequence.too_far(seq) or run.sequence.knows(seq):
            return

        async def refused(run: Run, request_id: str) -> Prepared:
            raise RequestError(error)

        deciding = run.deciding.get(seq) or self._track(run, seq, self._decide(run, seq, refused))
        await asyncio.wait((deciding,))

    async def unload(self, run: Run) -> str:
        """The model goes when all that was accepted for it is done. Returns the request's id once that is durable."""
        if run.unloading is None:
            run.unloading = asyncio.create_task(self._unload(run))
        try:
            await asyncio.shield(run.unloading)
        except StoreError:
            run.unloading = None
            raise
        return request_id_of(run.model_id, "unload")

    async def give_up_gaps(self, run: Run, waiting_since_before: float, timeout: float) -> None:
        """Fails requests whose predecessor never came, so that later ones may go on."""
        while (given_up := run.sequence.give_up(waiting_since_before)) is not None:
            first, last = given_up.missing[0], given_up.missing[-1]
            missing = f"seq_id {first}" if first == last else f"seq_ids {first} to {last}"
            late = f"{missing} did not arrive within {timeout:g} s"
            log.warning("%s: %s; %d requests behind fail", run.model_id, late, len(given_up.stranded))
            refusals = {
                seq: RequestError(f"seq_id {seq} comes too late: it was given up after {timeout:g} s")
                for seq in given_up.missing
            }
            run.refused |= refusals
            entries = [entry for _, entry in given_up.stranded]
            error = f"not done, since {late}, and requests of a model are done in order"

            def unit(database: Database, entries=entries, error=error, refusals=refusals) -> None:
                fail_entries(database, entries, error, "user")
                for seq, refusal in refusals.items():
                    insert_refusal(database, run.tenant, run.model_id, seq, refusal)

            await self._dispatch.fail(entries, error, "user", unit)
            self._dispatch.pump(run)

    def _track(self, run: Run, seq: int, decide: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In a task, so that a client who hangs up changes nothing, and one who asks again meanwhile gets the same."""
        task = asyncio.create_task(decide)
        run.deciding[seq] = task

        def decided(task: asyncio.Task[None]) -> None:
            run.deciding.pop(seq, None)
            if not task.cancelled():
                task.exception()  # its callers raise it; there may be none any more

        task.add_done_callback(decided)
        return task

    async def _create(self, run: Run, record: Record, insert: Insert) -> None:
        entry = Entry(request_id_of(run.model_id, 0), run.tenant, "create", record, run=run, seq=0)
        try:
            await self._keep(entry, insert)
        except BaseException:
            del self._live.runs[run.model_id]
            raise
        self._dispatch.due(run, run.sequence.offer(0, entry, time.monotonic()))

    async def _decide(self, run: Run, seq: int, prepare: Prepare) -> None:
        request_id = request_id_of(run.model_id, seq)
        try:
            prepared = await prepare(run, request_id)
        except RequestError as error:
            await self._store.write(
                partial(insert_refusal, tenant=run.tenant, model_id=run.model_id, seq=seq, refusal=error)
            )
            run.refused[seq] = error
            self._dispatch.due(run, run.sequence.offer(seq, None, time.monotonic()))
            raise
        entry = Entry(request_id, run.tenant, prepared.kind, prepared.record, run=run, seq=seq)
        if prepared.payload is not None:
            entry.payload = prepared.payload
            entry.payload_blob = await asyncio.to_thread(self._blobs.put, prepared.payload)
        await self._keep(entry)
        run.unsaved_request_at = time.time()
        self._dispatch.due(run, run.sequence.offer(seq, entry, time.monotonic()))

    async def _keep(self, entry: Entry, insert: Insert = insert_entry) -> None:
        """From here on the request exists; if it cannot be written down it never did."""
        self._limits.enter(entry.tenant, None)
        self._live.promise(entry)
        self._live.pending[entry.request_id] = entry
        try:
            await self._store.write(lambda database: insert(database, entry))
        except IntegrityError:
            log.warning("%s was written down before, though it had seemed to fail", entry.request_id)
        except BaseException as error:
            self._limits.leave(entry.tenant, None)
            self._live.keep_promise(entry)
            del self._live.pending[entry.request_id]
            if entry.payload_blob is not None and not _may_stand(error):
                await asyncio.to_thread(self._blobs.drop, entry.payload_blob)
            raise

    async def _unload(self, run: Run) -> None:
        if run.deciding:
            await asyncio.wait(list(run.deciding.values()))
        stranded = [entry for _, entry in run.sequence.abandon()]
        if stranded:
            error = "not done: the model was unloaded before its earlier requests arrived"
            await self._dispatch.fail(stranded, error, "user")
        request_id = request_id_of(run.model_id, "unload")
        order = Unload(request_id=request_id, tenant=run.tenant, model_id=run.model_id, seq=run.sequence.next_seq)
        answer = orjson.dumps({"model_id": run.model_id, "type": "unload_model"})
        entry = Entry(request_id, run.tenant, "unload", Record(order=order, answer=answer), run=run)
        await self._keep(entry)
        self._dispatch.due(run, [entry])


def _may_stand(error: BaseException) -> bool:
    """Whether the row may have been written all the same: it would name the blob."""
    return isinstance(error, StoreError) and error.may_stand
