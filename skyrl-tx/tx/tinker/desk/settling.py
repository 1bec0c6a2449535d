"""What became of a request: first written down, with all that follows from it, then told.

A finished `Save` becomes a checkpoint or a sampler in the transaction that makes it done, so neither is ever there
without the other.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sqlmodel import Session as Database

from tx.tinker.desk.futures import Futures
from tx.tinker.desk.limits import Limits
from tx.tinker.desk.live import Entry, Live, Run, Sampler, sampler_id_of
from tx.tinker.desk.records import SaveEffect
from tx.tinker.desk.results import StoredResult
from tx.tinker.desk.rows import fail_entries, finish_entry, forget_orders, num_pending, touch_model
from tx.tinker.engine.messages import CreateModel, Done, Load, Save, Snapshotted
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import CheckpointRow, ModelRow, RequestRow, SamplerRow, SessionRow
from tx.tinker.storage.garbage import doom
from tx.tinker.storage.store import Store
from tx.tinker.types import TinkerPath

INLINE_BYTES = 32 << 10
"""Larger payloads and results are files of their own."""
CHANGES_MODEL = ("create", "train", "optimize", "load")
"""Kinds that are done again to bring a model back, until a snapshot contains them."""


@dataclass
class Aftermath:
    """What follows in memory and on disk once an outcome is recorded."""

    sampler: Sampler | None = None
    blobs: list[str] = field(default_factory=list)
    """That may go."""
    snapshot: str | None = None
    """That may go."""


class Settling:
    def __init__(self, store: Store, blobs: Blobs, live: Live, limits: Limits, futures: Futures):
        self._store, self._blobs, self._live, self._limits, self._futures = store, blobs, live, limits, futures

    async def done(self, entry: Entry, message: Done) -> None:
        """The engine did it. `entry.settling` is set by the caller, when the message comes."""
        body = entry.record.answer or message.result
        blob = await asyncio.to_thread(self._blobs.put, body) if len(body) > INLINE_BYTES else None
        unit = partial(_record_done, entry=entry, body=body, blob=blob, size_bytes=message.size_bytes)
        aftermath = await self._store.write(unit)
        self._follow(entry, aftermath)
        self._release(entry, StoredResult(entry.request_id, entry.kind, body))
        await self._drop(aftermath.blobs)
        await remove_snapshot(aftermath.snapshot)

    async def failed(
        self,
        entries: Iterable[Entry],
        error: str,
        category: str,
        *,
        do_again: bool = False,
        also: Callable[[Database], None] = lambda database: None,
    ) -> list[Entry]:
        """They failed, alone; but with a model's creation all its requests fail.

        Args:
            do_again: the failure is a part of the model's history (an optimizer step that met a gradient that was not
                finite, and cleared it)
            also: a unit for the same transaction

        Returns:
            those that are settled now
        """
        entries = list(entries)
        for entry in entries:
            entry.settling = True
        never_made = [entry.run for entry in entries if entry.kind == "create" and entry.run is not None]
        behind = [other for run in never_made for other in (*run.queue.values(), *_taken_early(run))]
        behind = [other for other in dict.fromkeys(behind) if other not in entries]
        for entry in behind:
            entry.settling = True

        def unit(database: Database) -> None:
            fail_entries(database, entries, error, category, keep_order=do_again)
            fail_entries(database, behind, f"the model could not be created: {error}", category)
            for run in never_made:
                touch_model(database, run.model_id, status="failed", next_seq=run.sequence.next_seq)
            also(database)

        try:
            await self._store.write(unit)
        except BaseException:
            for entry in (*entries, *behind):
                entry.settling = False
            raise
        for run in never_made:
            self._live.runs.pop(run.model_id, None)
        for entry in (*entries, *behind):
            text = error if entry in entries else f"the model could not be created: {error}"
            self._release(entry, StoredResult(entry.request_id, entry.kind, None, text, category))
        if not do_again:
            await self._drop([entry.payload_blob for entry in (*entries, *behind) if entry.payload_blob is not None])
        return [*entries, *behind]

    async def snapshotted(self, message: Snapshotted) -> None:
        """A model is safe up to a seq: what came before need not be kept."""
        run = self._live.runs.get(message.model_id)
        if run is not None:
            being_recorded = [e.finished for e in run.queue.values() if e.settling and (e.seq or 0) <= message.seq]
            if being_recorded:
                await asyncio.wait(being_recorded, timeout=60)
        before = await self._store.write(partial(_record_snapshot, message=message))
        if run is None:
            await remove_snapshot(message.folder)
            return
        if before is None:  # not recorded; the engine may restore the model from it all the same, so a start sweeps it
            return
        folder, blobs = before
        run.snapshot, run.snapshot_seq = message.folder, message.seq
        for seq in [seq for seq in run.needed_folders if seq <= message.seq]:
            del run.needed_folders[seq]
        await remove_snapshot(folder)
        await self._drop(blobs)

    def already(self, entry: Entry, row: RequestRow, body: bytes | None) -> None:
        """The database has the outcome, though its transaction seemed to fail."""
        self._release(entry, StoredResult(entry.request_id, entry.kind, body, row.error, row.category))

    def _release(self, entry: Entry, result: StoredResult) -> None:
        """It is pending no more; who waits for it is told."""
        if entry.run is not None:
            entry.run.queue.pop(entry.request_id, None)
            self._live.keep_promise(entry)
        if self._live.pending.pop(entry.request_id, None) is not None:
            self._limits.leave(entry.tenant, entry.tokens if entry.kind == "sample" else None)
        self._futures.publish(entry, result)

    def _follow(self, entry: Entry, aftermath: Aftermath) -> None:
        if aftermath.sampler is not None and aftermath.sampler.session_id in self._live.sessions:
            self._live.samplers[aftermath.sampler.sampler_id] = aftermath.sampler
        order, run = entry.record.order, entry.run
        if run is not None and isinstance(order, CreateModel | Load) and order.folder and order.seq > run.snapshot_seq:
            run.needed_folders[order.seq] = order.folder
        if run is not None and entry.kind == "unload":
            self._live.runs.pop(run.model_id, None)

    async def _drop(self, blobs: list[str]) -> None:
        if blobs:
            await asyncio.to_thread(lambda: [self._blobs.drop(blob) for blob in blobs])


async def remove_snapshot(folder: str | None) -> None:
    """Nothing to do if there is none. Snapshots are folders on this machine's disk."""
    if folder is not None:
        await asyncio.to_thread(_remove, Path(folder))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # the model has others
        folder.parent.rmdir()


def _taken_early(run: Run) -> list[Entry]:
    return [entry for _, entry in run.sequence.abandon()]


# ---- units


def _record_done(database: Database, entry: Entry, body: bytes, blob: str | None, size_bytes: int) -> Aftermath:
    keep_order = entry.kind in CHANGES_MODEL
    finish_entry(database, entry, body if blob is None else None, blob, keep_order=keep_order)
    aftermath = Aftermath(blobs=[entry.payload_blob] if entry.payload_blob and not keep_order else [])
    if entry.record.save is not None:
        aftermath.sampler = _record_save(database, entry, entry.record.save, size_bytes)
    if entry.kind == "unload" and entry.run is not None:
        aftermath.snapshot = database.get_one(ModelRow, entry.run.model_id).snapshot
        touch_model(
            database, entry.run.model_id, status="unloaded", snapshot=None, next_seq=entry.run.sequence.next_seq
        )
        aftermath.blobs += forget_orders(database, entry.run.model_id)
    return aftermath


def _record_save(database: Database, entry: Entry, effect: SaveEffect, size_bytes: int) -> Sampler | None:
    order, run, now = entry.record.order, entry.run, time.time()
    assert isinstance(order, Save) and run is not None
    path = None
    if effect.name is not None:
        path = str(TinkerPath(run.model_id, effect.kind, effect.name))
        before = database.get(CheckpointRow, (run.model_id, effect.kind, effect.name))
        row = before or CheckpointRow(
            model_id=run.model_id,
            kind=effect.kind,
            name=effect.name,
            tenant=run.tenant,
            folder=order.folder,
            created_at=now,
        )
        replaced = row.folder
        row.folder, row.created_at, row.size_bytes = order.folder, now, size_bytes
        row.expires_at = None if effect.ttl_seconds is None else now + effect.ttl_seconds
        row.user_metadata = effect.user_metadata
        database.add(row)
        database.flush()
        if replaced != order.folder:
            doom(database, [replaced], now)
    if effect.sampling_session_seq_id is None:
        return None
    session = database.get(SessionRow, run.session_id)
    sampler_id = sampler_id_of(run.session_id, effect.sampling_session_seq_id)
    if session is None or session.ended_at is not None or database.get(SamplerRow, sampler_id) is not None:
        doom(database, [order.folder], now)
        return None
    database.add(
        SamplerRow(
            sampler_id=sampler_id,
            tenant=run.tenant,
            session_id=run.session_id,
            sampling_session_seq_id=effect.sampling_session_seq_id,
            base_model=run.base_model,
            model_path=path,
            model_id=run.model_id,
            folder=order.folder,
            ephemeral=path is None,
            created_at=now,
        )
    )
    return Sampler(sampler_id, run.tenant, run.session_id, run.base_model, path, order.folder)


def _record_snapshot(database: Database, message: Snapshotted) -> tuple[str | None, list[str]] | None:
    """Returns the folder before and blobs that may go, or None if this snapshot is not to be used."""
    model = database.get(ModelRow, message.model_id)
    if model is None or model.status != "live" or model.snapshot_seq >= message.seq:
        return None
    if num_pending(database, message.model_id, message.seq):
        return None  # it contains what is not recorded; a new engine would do it twice
    before = model.snapshot
    model.snapshot, model.snapshot_seq = message.folder, message.seq
    model.next_seq = max(model.next_seq, message.seq + 1)
    return before, forget_orders(database, message.model_id, message.seq)
