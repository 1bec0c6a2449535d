"""Dispatch of commands to the present engine, and again to the next one after a crash.

A new engine receives a model only when there is a command for it: first its snapshot, then the commands after that to
replay, then the due ones, in order. So an idle model that cannot be restored affects no other.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial

import msgspec
from sqlmodel import Session as Database

from tx.tinker.commands import StoredCommand, Train
from tx.tinker.engine.messages import Cancel, Done, Failed, FromApi, FromEngine, Restore, Snapshotted
from tx.tinker.service.crash_bisector import CrashBisector
from tx.tinker.service.engine_link import EngineLink
from tx.tinker.service.recorder import ResultRecorder
from tx.tinker.service.recovery import RestoredRequests, find_commands_after_snapshot
from tx.tinker.service.rows import record_deaths, set_at_work
from tx.tinker.service.state import PendingRequest, Run, ServerState
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.store import Store, StoreError

log = logging.getLogger(__name__)


class StaleEngineError(Exception):
    """The engine crashed while commands were being sent to it."""


class Dispatch:
    """Queues of commands and their delivery to the engine."""

    def __init__(
        self, store: Store, blobs: Blobs, state: ServerState, link: EngineLink, recording_result: ResultRecorder
    ):
        self._store, self._blobs, self._state, self._link, self._recorder = store, blobs, state, link, recording_result
        self._bisector = CrashBisector[PendingRequest]()
        self._samples: dict[str, PendingRequest] = {}
        """Pending sampling requests."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_culprit_requests = 0
        self.recording: set[str] = set()
        """Folders of snapshots that are being written down."""

    # ---- work

    async def restore(self, restored: RestoredRequests) -> None:
        """Take over restored requests, before the first engine is ready."""
        self._bisector.restore(restored.num_deaths)
        for pending in restored.samples:
            await self.sample(pending)
        if restored.died_at_work:
            heads = [run.head for run in self._state.runs.values()]
            await self._count_crash([*heads, *restored.samples], "the server crashed with it")

    def due(self, run: Run, pending_requests: list[PendingRequest]) -> None:
        """Queue requests after all their predecessors have arrived."""
        if pending_requests and run.model_id not in self._state.runs:  # its creation failed while these were accepted
            self.spawn(self.fail(pending_requests, "the model could not be created", "user"))
            return
        for pending in pending_requests:
            run.queue[pending.request_id] = pending
        self.pump(run)

    def pump(self, run: Run) -> None:
        """Send the engine the queued commands of a model that it has not received."""
        if not self._link.ready:
            for pending in run.queue.values():
                if pending.payload_blob is not None:
                    pending.payload = None  # it may wait for long; there is the blob
        elif not run.pumping and self._find_next(run) is not None:
            run.pumping = True
            self.spawn(self._send_queued(run))

    async def sample(self, pending: PendingRequest) -> None:
        """Send a sample request now, or once the engine is ready."""
        self._samples[pending.request_id] = pending
        await self._send_sample(pending)

    async def fail(
        self,
        pending_requests: list[PendingRequest],
        error: str,
        category: str,
        also: Callable[[Database], None] = lambda database: None,
        *,
        do_again: bool = False,
    ) -> None:
        """Fail requests that will not be executed."""
        for pending in await self._recorder.failed(pending_requests, error, category, do_again=do_again, also=also):
            self._handle_finished(pending)

    async def cancel_samples(self, sampler_ids: set[str], reason: str) -> None:
        """Cancel the pending samples of these samplers."""
        pending_requests = [e for e in self._samples.values() if e.sampler_id in sampler_ids and not e.recording_result]
        if pending_requests:
            await self._link.send(Cancel(request_ids=[pending.request_id for pending in pending_requests]))
            await self.fail(pending_requests, reason, "user")

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background; `close` cancels it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._handle_end)

    async def close(self) -> None:
        """Wait for results that are being recorded, and cancel all other work."""
        recording_result = [pending.finished for pending in self._state.pending.values() if pending.recording_result]
        if recording_result:
            await asyncio.wait(recording_result, timeout=5)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(StoreError):  # the next server then takes this exit for a crash
            await self._store.write(partial(set_at_work, at_work=False))

    def _handle_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("in the background", exc_info=error)

    # ---- what the engine does

    def on_ready(self) -> None:
        """Start sending to a new engine."""
        self.spawn(self._store.write(partial(set_at_work, at_work=True)))
        self._resume_models()

    def on_message(self, message: FromEngine) -> None:
        """Record a result or a snapshot of the engine."""
        if isinstance(message, Snapshotted):
            self.recording.add(message.folder)
            self.spawn(self._handle_snapshot(message))
        elif isinstance(message, Done | Failed):
            pending = self._state.pending.get(message.request_id)
            if pending is not None and not pending.recording_result:
                self._link.reset_restart_delay()
                pending.recording_result = True
                self.spawn(self._record_outcome(pending, message))

    async def on_crash(self, why: str) -> None:
        """Count a crash of the engine, and fail its culprit once identified."""
        heads = [run.head for run in self._state.runs.values() if run.touched_in == self._link.engine_generation]
        samples = [pending for pending in self._samples.values() if pending.sent_to == self._link.engine_generation]
        await self._count_crash([*heads, *samples], why)

    async def _count_crash(self, present: Iterable[PendingRequest | None], why: str) -> None:
        culprit_request = self._bisector.record_crash(
            [pending for pending in present if pending is not None and not pending.recording_result]
        )
        num_deaths = {pending.request_id: number for pending, number in self._bisector.deaths.items()}
        await self._store.write(partial(record_deaths, num_deaths=num_deaths))
        if culprit_request is not None:
            self.num_culprit_requests += 1
            log.error("request %s crashes the engine on every attempt; it is failed", culprit_request.request_id)
            await self.fail([culprit_request], f"the engine crashed on every attempt; last error: {why}", "server")

    # ---- sending

    def _resume_models(self) -> None:
        for run in self._state.runs.values():
            self.pump(run)
        for pending in self._samples.values():
            self.spawn(self._send_sample(pending))

    def _find_next(self, run: Run) -> PendingRequest | None:
        """Return the next request to send. A suspect that waits for its trial blocks later requests."""
        engine_generation = self._link.engine_generation
        pending = next(
            (e for e in run.queue.values() if not e.recording_result and e.sent_to != engine_generation), None
        )
        return pending if pending is not None and self._bisector.may_run(pending) else None

    async def _send_queued(self, run: Run) -> None:
        engine_generation = self._link.engine_generation
        try:
            while (
                self._link.ready
                and self._link.engine_generation == engine_generation
                and (pending := self._find_next(run)) is not None
            ):
                run.touched_in = engine_generation
                if run.resident_in != engine_generation:
                    if pending.kind == "unload":  # the last command: no need to reload the model
                        await self._record_done_without_engine(pending)
                        return
                    await self._reload_model(run, pending, engine_generation)
                    run.resident_in = engine_generation
                    continue
                await self._send(await self._load_payload(pending), engine_generation)
                pending.sent_to, pending.payload = engine_generation, None
        except StaleEngineError:
            pass
        except StoreError:
            log.exception("%s cannot be read", run.model_id)
            await asyncio.sleep(1)
        except FileNotFoundError:
            log.exception("%s cannot be sent to the engine", run.model_id)
            lost = [
                pending
                for pending in run.queue.values()
                if not pending.recording_result and pending.sent_to != engine_generation
            ]
            await self.fail(
                lost,
                "the stored state of this model no longer exists (its log names the file): create a model "
                "from its last checkpoint",
                "server",
            )
        finally:
            run.pumping = False
        self.pump(run)

    async def _reload_model(self, run: Run, first: PendingRequest, engine_generation: int) -> None:
        """Send the engine a model's snapshot and the commands to replay; it reports no results of those."""
        if first.kind == "create":
            return
        recording = [pending.finished for pending in run.queue.values() if pending.recording_result]
        if recording:
            await asyncio.wait(recording, timeout=60)
        rows = await self._store.read(partial(find_commands_after_snapshot, model_id=run.model_id))
        await self._send(
            Restore(
                model_id=run.model_id, tenant=run.tenant, lora=run.lora, snapshot=run.snapshot, seq=run.snapshot_seq
            ),
            engine_generation,
        )
        for row in rows:
            if (pending := run.queue.get(row.request_id)) is not None:
                body = row.result if row.result_blob is None else await self._read_blob(row.result_blob)
                self._recorder.already(pending, row, body)
                self._handle_finished(pending)
            if row.order is None:
                continue
            command = msgspec.structs.replace(StoredCommand.decode(row.order).command, replay=True)
            if isinstance(command, Train) and row.payload is not None:
                command = msgspec.structs.replace(command, payload=await self._read_blob(row.payload))
            await self._send(command, engine_generation)

    async def _load_payload(self, pending: PendingRequest) -> FromApi:
        """Return the command with its payload."""
        command = pending.stored.command
        if isinstance(command, Train) and pending.payload_blob is not None:
            payload = pending.payload if pending.payload is not None else await self._read_blob(pending.payload_blob)
            return msgspec.structs.replace(command, payload=payload)
        return command

    async def _send_sample(self, pending: PendingRequest) -> None:
        engine_generation = self._link.engine_generation
        if (
            self._link.ready
            and pending.sent_to != engine_generation
            and not pending.recording_result
            and self._bisector.may_run(pending)
        ):
            pending.sent_to = engine_generation
            await self._link.send(pending.stored.command)

    async def _send(self, message: FromApi, engine_generation: int) -> None:
        if self._link.engine_generation != engine_generation or not self._link.ready:
            raise StaleEngineError
        await self._link.send(message)

    async def _read_blob(self, blob: str) -> bytes:
        return await asyncio.to_thread(self._blobs.get, blob)

    # ---- outcomes

    async def _handle_snapshot(self, message: Snapshotted) -> None:
        try:
            await self._recorder.snapshotted(message)
        finally:
            self.recording.discard(message.folder)

    async def _record_outcome(self, pending: PendingRequest, message: Done | Failed) -> None:
        try:
            if isinstance(message, Done):
                await self._recorder.done(pending, message)
                self._handle_finished(pending)
            else:
                do_again = pending.kind == "optimize" and message.category == "user"
                await self.fail([pending], message.error, message.category, do_again=do_again)
        except Exception:  # engine and database differ: an engine restored from the database does not
            log.exception("the outcome of %s could not be recorded", pending.request_id)
            pending.recording_result = False
            self._link.kill("its result could not be recorded")

    async def _record_done_without_engine(self, pending: PendingRequest) -> None:
        pending.recording_result = True
        await self._record_outcome(pending, Done(request_id=pending.request_id, result=b"{}"))

    def _handle_finished(self, pending: PendingRequest) -> None:
        self._samples.pop(pending.request_id, None)
        if self._bisector.finished(pending):
            self._resume_models()
