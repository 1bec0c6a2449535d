"""Recording of results: commit to the database first, then update memory and wake the waiters.

A completed `Save` becomes a checkpoint or a sampler in the transaction that completes it, so neither exists without the
other.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from sqlmodel import Session as Database

from tx.tinker.commands import INLINE_BYTES, REPLAYED_KINDS, ModelCommand, PostCommit, Sample
from tx.tinker.engine.messages import Done, Snapshotted
from tx.tinker.service.futures import Futures
from tx.tinker.service.limits import Limits
from tx.tinker.service.results import StoredResult
from tx.tinker.service.rows import count_pending, fail_requests, finish_request
from tx.tinker.service.run_files import RunFiles
from tx.tinker.service.state import PendingRequest, Sampler, ServerState
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import ModelRow, RequestRow
from tx.tinker.storage.rows import remove_commands, update_model
from tx.tinker.storage.store import Store


class ResultRecorder:
    """Writer of results to the database.

    Args:
        private: folders of the server, which no error shows to a client
    """

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        state: ServerState,
        limits: Limits,
        futures: Futures,
        run_files: RunFiles,
        private: Sequence[str] = (),
    ):
        self._store, self._blobs, self._state, self._limits, self._futures = store, blobs, state, limits, futures
        self._run_files, self._private = run_files, private

    async def done(self, pending: PendingRequest, message: Done) -> None:
        """Record success. The caller sets `pending.recording_result` when the message arrives."""
        body = pending.stored.answer or message.result
        blob = await asyncio.to_thread(self._blobs.put, body) if len(body) > INLINE_BYTES else None
        unit = partial(_record_done, pending=pending, body=body, blob=blob, size_bytes=message.size_bytes)
        post_commit = await self._store.write(unit)
        sampler = self._state.samplers.get(pending.sampler_id or "")
        self._run_files.done(pending, message.metrics, None if sampler is None else sampler.model_id, body)
        self._apply_post_commit(pending, post_commit)
        self._release(pending, StoredResult(pending.request_id, pending.kind, body), _count_tokens(pending, message))
        await self._delete_blobs(post_commit.blobs)
        await remove_snapshot(post_commit.snapshot)

    async def failed(
        self,
        pending_requests: Iterable[PendingRequest],
        error: str,
        category: str,
        *,
        do_again: bool = False,
        also: Callable[[Database], None] = lambda database: None,
    ) -> list[PendingRequest]:
        """Record failures. A failed creation fails all requests of the model.

        Args:
            do_again: the failure is a part of the model's history (an optimizer step that met a gradient that was not
                finite, and cleared it)
            also: a unit for the same transaction

        Returns:
            all requests that failed
        """
        pending_requests = list(pending_requests)
        for folder in self._private:
            error = error.replace(folder, "…")
        for pending in pending_requests:
            pending.recording_result = True
        never_made = [
            pending.run for pending in pending_requests if pending.kind == "create" and pending.run is not None
        ]
        behind = [other for run in never_made for other in (*run.queue.values(), *run.sequence.drain())]
        behind = [other for other in dict.fromkeys(behind) if other not in pending_requests]
        for pending in behind:
            pending.recording_result = True

        def unit(database: Database) -> None:
            fail_requests(database, pending_requests, error, category, keep_command=do_again)
            fail_requests(database, behind, f"the model could not be created: {error}", category)
            for run in never_made:
                update_model(database, run.model_id, status="failed", next_seq=run.sequence.next_seq)
            also(database)

        try:
            await self._store.write(unit)
        except BaseException:
            for pending in (*pending_requests, *behind):
                pending.recording_result = False
            raise
        for run in never_made:
            self._state.runs.pop(run.model_id, None)
        for pending in (*pending_requests, *behind):
            text = error if pending in pending_requests else f"the model could not be created: {error}"
            self._run_files.failed(pending, text, category)
            self._release(pending, StoredResult(pending.request_id, pending.kind, None, text, category))
        if not do_again:
            await self._delete_blobs(
                [pending.payload_blob for pending in (*pending_requests, *behind) if pending.payload_blob is not None]
            )
        return [*pending_requests, *behind]

    async def snapshotted(self, message: Snapshotted) -> None:
        """Record a snapshot, and forget the commands that it contains."""
        run = self._state.runs.get(message.model_id)
        if run is not None:
            being_recorded = [
                e.finished for e in run.queue.values() if e.recording_result and (e.seq or 0) <= message.seq
            ]
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
        await self._delete_blobs(blobs)

    def already(self, pending: PendingRequest, row: RequestRow, body: bytes | None) -> None:
        """Publish a result that the database has although its transaction seemed to fail."""
        self._release(pending, StoredResult(pending.request_id, pending.kind, body, row.error, row.category))

    def _release(self, pending: PendingRequest, result: StoredResult, used_tokens: int = 0) -> None:
        """Remove the request from memory and wake its waiters."""
        if pending.run is not None:
            pending.run.queue.pop(pending.request_id, None)
            self._state.keep_promise(pending)
        if self._state.pending.pop(pending.request_id, None) is not None:
            self._limits.leave(pending.tenant, pending.tokens if pending.kind == "sample" else None, used_tokens)
        self._futures.publish(pending, result)

    def _apply_post_commit(self, pending: PendingRequest, post_commit: PostCommit) -> None:
        if post_commit.sampler is not None and post_commit.sampler.session_id in self._state.sessions:
            self._state.samplers[post_commit.sampler.sampler_id] = Sampler.of(post_commit.sampler)
        command, run = pending.stored.command, pending.run
        source = command.source_folder if isinstance(command, ModelCommand) else None
        if run is not None and isinstance(command, ModelCommand) and source and command.seq > run.snapshot_seq:
            run.needed_folders[command.seq] = source
        if run is not None and pending.kind == "unload":
            self._state.runs.pop(run.model_id, None)

    async def _delete_blobs(self, blobs: list[str]) -> None:
        if blobs:
            await asyncio.to_thread(lambda: [self._blobs.drop(blob) for blob in blobs])


def _count_tokens(pending: PendingRequest, message: Done) -> int:
    """Return the tokens of a sample's prompt and responses; 0 of all else."""
    command = pending.stored.command
    return len(command.spec.prompt) + int(message.metrics.get("tokens", 0)) if isinstance(command, Sample) else 0


async def remove_snapshot(folder: str | None) -> None:
    """Delete a snapshot, a folder on the local disk, if there is one."""
    if folder is not None:
        await asyncio.to_thread(_remove, Path(folder))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # the model has others
        folder.parent.rmdir()


# ---- units


def _record_done(
    database: Database, pending: PendingRequest, body: bytes, blob: str | None, size_bytes: int
) -> PostCommit:
    keep_command, command = pending.kind in REPLAYED_KINDS, pending.stored.command
    finish_request(database, pending, body if blob is None else None, blob, keep_command=keep_command)
    post_commit = PostCommit()
    if isinstance(command, ModelCommand):
        post_commit = command.record(database, pending.stored.save, size_bytes)
    if pending.payload_blob and not keep_command:
        post_commit.blobs.append(pending.payload_blob)
    return post_commit


def _record_snapshot(database: Database, message: Snapshotted) -> tuple[str | None, list[str]] | None:
    """Return the previous folder and the blobs to delete, or None if this snapshot must not be used."""
    model = database.get(ModelRow, message.model_id)
    if model is None or model.status != "live" or model.snapshot_seq >= message.seq:
        return None
    if count_pending(database, message.model_id, message.seq):
        return None  # contains unrecorded commands, which a new engine would execute twice
    before = model.snapshot
    model.snapshot, model.snapshot_seq = message.folder, message.seq
    model.next_seq = max(model.next_seq, message.seq + 1)
    return before, remove_commands(database, message.model_id, message.seq)
