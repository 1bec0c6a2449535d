"""Passing work on to the engine of the moment, and again to the next one if it dies.

Of a model, a new engine is told nothing until there is something to do for it: then how to bring it back, what came
after its snapshot, and what is due, in order. So an idle model that cannot be brought back harms nobody.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from sqlmodel import Session as Database

from tx.tinker.desk.engine_link import EngineLink
from tx.tinker.desk.live import Entry, Live, Run
from tx.tinker.desk.records import decode_record
from tx.tinker.desk.recovery import Recalled, orders_after_snapshot
from tx.tinker.desk.rows import record_deaths, set_at_work
from tx.tinker.desk.settling import Settling
from tx.tinker.desk.suspects import Suspects
from tx.tinker.engine.messages import Cancel, Done, Failed, FromEngine, Restore, Snapshotted, Train
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.store import Store, StoreError

log = logging.getLogger(__name__)


class AnotherLife(Exception):
    """The engine died while it was told something."""


class Dispatch:
    def __init__(self, store: Store, blobs: Blobs, live: Live, link: EngineLink, settling: Settling):
        self._store, self._blobs, self._live, self._link, self._settling = store, blobs, live, link, settling
        self._suspects = Suspects[Entry]()
        self._samples: dict[str, Entry] = {}
        """Of the pending ones."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_culprits = 0
        self.recording: set[str] = set()
        """Folders of snapshots that are being written down."""

    # ---- work

    async def recall(self, recalled: Recalled) -> None:
        """Before the first engine is ready."""
        self._suspects.recall(recalled.num_deaths)
        for entry in recalled.samples:
            await self.sample(entry)
        if recalled.died_at_work:
            heads = [run.head for run in self._live.runs.values()]
            await self._count_death([*heads, *recalled.samples], "the server died with it")

    def due(self, run: Run, entries: list[Entry]) -> None:
        """It is the turn of these requests of a model."""
        if entries and run.model_id not in self._live.runs:  # its creation failed while these were accepted
            self.spawn(self.fail(entries, "the model could not be created", "user"))
            return
        for entry in entries:
            run.queue[entry.request_id] = entry
        self.pump(run)

    def pump(self, run: Run) -> None:
        """Tells the engine what it has not been told of this model."""
        if not self._link.ready:
            for entry in run.queue.values():
                if entry.payload_blob is not None:
                    entry.payload = None  # it may wait for long; there is the blob
        elif not run.pumping and self._next(run) is not None:
            run.pumping = True
            self.spawn(self._pump(run))

    async def sample(self, entry: Entry) -> None:
        self._samples[entry.request_id] = entry
        await self._send_sample(entry)

    async def fail(
        self,
        entries: list[Entry],
        error: str,
        category: str,
        also: Callable[[Database], None] = lambda database: None,
        *,
        do_again: bool = False,
    ) -> None:
        """They will not be done."""
        for entry in await self._settling.failed(entries, error, category, do_again=do_again, also=also):
            self._finished(entry)

    async def cancel_samples(self, sampler_ids: set[str], reason: str) -> None:
        """Nobody waits for samples of these samplers any more."""
        entries = [e for e in self._samples.values() if e.sampler_id in sampler_ids and not e.settling]
        if entries:
            await self._link.send(Cancel(request_ids=[entry.request_id for entry in entries]))
            await self.fail(entries, reason, "user")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """In the background, until `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Lets results that came be recorded, and stops everything else."""
        settling = [entry.finished for entry in self._live.pending.values() if entry.settling]
        if settling:
            await asyncio.wait(settling, timeout=5)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(StoreError):  # the next server then takes this end for a death
            await self._store.write(partial(set_at_work, at_work=False))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("in the background", exc_info=error)

    # ---- what the engine does

    def on_ready(self) -> None:
        """A new engine that knows nothing."""
        self.spawn(self._store.write(partial(set_at_work, at_work=True)))
        self._go_on()

    def on_message(self, message: FromEngine) -> None:
        if isinstance(message, Snapshotted):
            self.recording.add(message.folder)
            self.spawn(self._snapshotted(message))
        elif isinstance(message, Done | Failed):
            entry = self._live.pending.get(message.request_id)
            if entry is not None and not entry.settling:
                self._link.did_something()
                entry.settling = True
                self.spawn(self._settle(entry, message))

    async def on_death(self, why: str) -> None:
        heads = [run.head for run in self._live.runs.values() if run.touched_in == self._link.life]
        samples = [entry for entry in self._samples.values() if entry.sent_to == self._link.life]
        await self._count_death([*heads, *samples], why)

    async def _count_death(self, present: Iterable[Entry | None], why: str) -> None:
        guilty = self._suspects.died([entry for entry in present if entry is not None and not entry.settling])
        num_deaths = {entry.request_id: number for entry, number in self._suspects.deaths.items()}
        await self._store.write(partial(record_deaths, num_deaths=num_deaths))
        if guilty is not None:
            self.num_culprits += 1
            log.error("request %s ends the engine whenever it is tried; it fails", guilty.request_id)
            await self.fail([guilty], f"the engine died each time this was tried; last: {why}", "server")

    # ---- sending

    def _go_on(self) -> None:
        for run in self._live.runs.values():
            self.pump(run)
        for entry in self._samples.values():
            self.spawn(self._send_sample(entry))

    def _next(self, run: Run) -> Entry | None:
        """What this engine may be told next of a model. One that waits for a trial holds up those behind it."""
        life = self._link.life
        entry = next((e for e in run.queue.values() if not e.settling and e.sent_to != life), None)
        return entry if entry is not None and self._suspects.may_run(entry) else None

    async def _pump(self, run: Run) -> None:
        life = self._link.life
        try:
            while self._link.ready and self._link.life == life and (entry := self._next(run)) is not None:
                run.touched_in = life
                if run.resident_in != life:
                    if entry.kind == "unload":  # nothing else is to do: no need to bring it back for that
                        await self._settle_here(entry)
                        return
                    await self._bring_back(run, entry, life)
                    run.resident_in = life
                    continue
                await self._send(await self._whole(entry), life)
                entry.sent_to, entry.payload = life, None
        except AnotherLife:
            pass
        except StoreError:
            log.exception("%s cannot be read", run.model_id)
            await asyncio.sleep(1)
        except FileNotFoundError as error:
            log.exception("%s cannot be told to the engine", run.model_id)
            lost = [entry for entry in run.queue.values() if not entry.settling and entry.sent_to != life]
            await self.fail(lost, f"what the server kept of this model is not there any more: {error}", "server")
        finally:
            run.pumping = False
        self.pump(run)

    async def _bring_back(self, run: Run, first: Entry, life: int) -> None:
        """Tells the engine what made the model what it is; it reports nothing of it."""
        if first.kind == "create":
            return
        recording = [entry.finished for entry in run.queue.values() if entry.settling]
        if recording:
            await asyncio.wait(recording, timeout=60)
        rows = await self._store.read(partial(orders_after_snapshot, model_id=run.model_id))
        await self._send(
            Restore(
                model_id=run.model_id, tenant=run.tenant, lora=run.lora, snapshot=run.snapshot, seq=run.snapshot_seq
            ),
            life,
        )
        for row in rows:
            if (entry := run.queue.get(row.request_id)) is not None:
                body = row.result if row.result_blob is None else await self._blob(row.result_blob)
                self._settling.already(entry, row, body)
                self._finished(entry)
            if row.order is None:
                continue
            order = msgspec.structs.replace(decode_record(row.order).order, replay=True)
            if isinstance(order, Train) and row.payload is not None:
                order = msgspec.structs.replace(order, payload=await self._blob(row.payload))
            await self._send(order, life)

    async def _whole(self, entry: Entry) -> Any:
        """The order with its payload."""
        order = entry.record.order
        if isinstance(order, Train) and entry.payload_blob is not None:
            payload = entry.payload if entry.payload is not None else await self._blob(entry.payload_blob)
            return msgspec.structs.replace(order, payload=payload)
        return order

    async def _send_sample(self, entry: Entry) -> None:
        life = self._link.life
        if self._link.ready and entry.sent_to != life and not entry.settling and self._suspects.may_run(entry):
            entry.sent_to = life
            await self._link.send(entry.record.order)

    async def _send(self, message: Any, life: int) -> None:
        if self._link.life != life or not self._link.ready:
            raise AnotherLife
        await self._link.send(message)

    async def _blob(self, blob: str) -> bytes:
        return await asyncio.to_thread(self._blobs.get, blob)

    # ---- outcomes

    async def _snapshotted(self, message: Snapshotted) -> None:
        try:
            await self._settling.snapshotted(message)
        finally:
            self.recording.discard(message.folder)

    async def _settle(self, entry: Entry, message: Done | Failed) -> None:
        try:
            if isinstance(message, Done):
                await self._settling.done(entry, message)
                self._finished(entry)
            else:
                do_again = entry.kind == "optimize" and message.category == "user"
                await self.fail([entry], message.error, message.category, do_again=do_again)
        except Exception:  # the engine has done it, the database does not know: an engine made from the database does
            log.exception("the outcome of %s could not be recorded", entry.request_id)
            entry.settling = False
            self._link.kill("what it had done could not be recorded")

    async def _settle_here(self, entry: Entry) -> None:
        entry.settling = True
        await self._settle(entry, Done(request_id=entry.request_id, result=b"{}"))

    def _finished(self, entry: Entry) -> None:
        self._samples.pop(entry.request_id, None)
        if self._suspects.finished(entry):
            self._go_on()
