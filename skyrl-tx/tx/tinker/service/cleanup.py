"""Periodic background work: writing times noted in memory, ending expired sessions, deleting garbage."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from sqlalchemy import bindparam, select, update
from sqlmodel import Session as Database
from sqlmodel import col

from tx.tinker.config import EngineConfig
from tx.tinker.service.checkpoints import sum_bytes_by_tenant
from tx.tinker.service.futures import Futures
from tx.tinker.service.intake import RequestIntake
from tx.tinker.service.recorder import remove_snapshot
from tx.tinker.service.sessions import Sessions
from tx.tinker.service.state import ServerState
from tx.tinker.storage import garbage
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import ModelRow, SessionRow
from tx.tinker.storage.folders import Folders
from tx.tinker.storage.store import Store

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
GAP_CHECK_SECONDS = 2.0
GARBAGE_SECONDS = 60.0
DISK_SECONDS = 10.0
LEFTOVERS_SECONDS = 3600.0


class BackgroundCleanup:
    """
    Args:
        snapshots: the local folder in which the engine writes `MODEL/SNAPSHOT`
    """

    def __init__(
        self,
        config: EngineConfig,
        store: Store,
        blobs: Blobs,
        folders: Folders,
        state: ServerState,
        futures: Futures,
        sessions: Sessions,
        intake: RequestIntake,
        snapshots: Path,
    ):
        self._config, self._store, self._blobs, self._folders = config, store, blobs, folders
        self._state, self._futures, self._sessions, self._intake = state, futures, sessions, intake
        self._snapshots = snapshots
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the periodic tasks."""
        self.every(FLUSH_SECONDS, self.flush)
        self.every(min(GAP_CHECK_SECONDS, self._config.seq_gap_timeout_sec / 4), self.give_up_gaps)
        self.every(GARBAGE_SECONDS, self.collect_garbage)
        self.every(DISK_SECONDS, self.measure_disks)
        self.every(LEFTOVERS_SECONDS, self.remove_leftovers)
        if self._config.session_timeout_sec >= 0 and self._config.session_cleanup_interval_sec >= 0:
            self.every(max(self._config.session_cleanup_interval_sec, 0.2), self.expire_sessions)

    async def close(self) -> None:
        """Cancel the tasks and write the pending times."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Write heartbeats, deliveries and times of last requests in one transaction."""
        heartbeats, touched = [], []
        for session in self._state.sessions.values():
            if session.unsaved_heartbeat is not None:
                heartbeats.append({"key": session.session_id, "at": session.unsaved_heartbeat})
                session.unsaved_heartbeat = None
        for run in self._state.runs.values():
            if run.unsaved_request_at is not None:
                touched.append({"key": run.model_id, "at": run.unsaved_request_at})
                run.unsaved_request_at = None
        delivered = [{"key": request_id, "at": at} for request_id, at in self._futures.delivered.items()]
        self._futures.delivered.clear()
        if heartbeats or touched or delivered:
            await self._store.write(partial(_record_times, heartbeats=heartbeats, touched=touched, delivered=delivered))

    async def give_up_gaps(self) -> None:
        """Fail requests that have waited too long for a predecessor."""
        timeout = self._config.seq_gap_timeout_sec
        for run in list(self._state.runs.values()):
            await self._intake.give_up_gaps(run, time.monotonic() - timeout, timeout)

    async def expire_sessions(self) -> None:
        """End sessions without a recent heartbeat."""
        for session in self._sessions.expired(self._config.session_timeout_sec):
            await self._sessions.end(session, "expired")

    async def collect_garbage(self) -> None:
        """Forget expired checkpoints, ended and superseded samplers, delivered results and spent payloads."""
        now, ttl = time.time(), self._config.result_ttl_sec
        await self._store.write(partial(garbage.remove_expired_checkpoints, now=now))
        await self._store.write(partial(garbage.remove_ended_samplers, now=now, ttl=0))
        superseded = self._state.superseded_samplers(self._config.keep_samplers, self._config.sampler_idle_sec)
        for sampler in superseded:
            del self._state.samplers[sampler.sampler_id]
        if superseded:
            ids = [sampler.sampler_id for sampler in superseded]
            try:
                await self._store.write(partial(garbage.remove_samplers, sampler_ids=ids, now=now))
            except BaseException:  # they stand in the database, and go another time
                self._state.samplers |= {sampler.sampler_id: sampler for sampler in superseded}
                raise
        for find in (partial(garbage.remove_delivered_results, now=now, ttl=ttl), garbage.remove_spent_payloads):
            while (forgotten := await self._store.write(find)).num_requests:
                await asyncio.to_thread(lambda blobs=forgotten.blobs: [self._blobs.drop(blob) for blob in blobs])
        await self.delete_scheduled_folders()

    async def measure_disks(self) -> None:
        """Note the size of checkpoints and the free bytes of disks."""
        self._state.checkpoint_bytes = await self._store.read(sum_bytes_by_tenant)
        self._state.free_bytes = await asyncio.to_thread(self._get_free_bytes)

    def _get_free_bytes(self) -> dict[str, int]:
        folders = {"state_free_bytes": str(self._config.state_folder), "checkpoints_free_bytes": self._folders.base}
        return {name: shutil.disk_usage(folder).free for name, folder in folders.items() if "://" not in folder}

    async def delete_scheduled_folders(self) -> None:
        """Delete folders scheduled for deletion, except those that pending work uses."""
        for folder in await self._store.read(garbage.list_scheduled_deletions):
            if folder in self._state.folders_in_use():
                continue
            await asyncio.to_thread(self._folders.remove, folder)
            await self._store.write(partial(garbage.remove_scheduled_deletion, folder=folder))

    async def remove_leftovers(self) -> None:
        """Delete blobs that a crash left on disk and that are too old to belong to requests in flight."""
        await self._remove_blobs(min_age_seconds=3600.0)

    async def run_startup_cleanup(self) -> None:
        """Delete leftover blobs and unused snapshots at the start, when no request is in flight."""
        await self._remove_blobs(min_age_seconds=0.0)
        await self.remove_unused_snapshots()

    async def remove_unused_snapshots(self, recording: frozenset[str] = frozenset()) -> None:
        """Delete snapshots that no model uses; call it only while no engine writes any.

        Args:
            recording: folders that are being written down at this moment
        """
        found = await asyncio.to_thread(lambda: {str(folder) for folder in self._snapshots.glob("*/*")})
        for folder in found - recording - set(await self._store.read(_find_snapshots_in_use)):
            await remove_snapshot(folder)

    async def _remove_blobs(self, min_age_seconds: float) -> None:
        find = partial(garbage.find_unreferenced_blobs, blobs=self._blobs, min_age_seconds=min_age_seconds)
        for blob in await self._store.read(find):
            await asyncio.to_thread(self._blobs.drop, blob)

    def every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat work until the end, first after `seconds`."""
        self._tasks.append(asyncio.create_task(_run_repeatedly(seconds, work)))


async def _run_repeatedly(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:  # a full disk today is no reason to do nothing tomorrow
            log.exception("background cleanup: %s", getattr(work, "__name__", work))


def _record_times(database: Database, heartbeats: list[dict], touched: list[dict], delivered: list[dict]) -> None:
    tables = SessionRow.metadata.tables
    sessions, models, requests = tables["sessions"], tables["models"], tables["requests"]
    key, at = bindparam("key"), bindparam("at")
    connection = database.connection()
    if heartbeats:
        connection.execute(
            update(sessions).where(sessions.c.session_id == key).values(last_heartbeat_at=at), heartbeats
        )
    if touched:
        connection.execute(update(models).where(models.c.model_id == key).values(last_request_at=at), touched)
    if delivered:
        first_time = (requests.c.request_id == key) & requests.c.delivered_at.is_(None)
        connection.execute(update(requests).where(first_time).values(delivered_at=at), delivered)


def _find_snapshots_in_use(database: Database) -> list[str]:
    column = col(ModelRow.snapshot)
    return [folder for folder in database.scalars(select(column).where(column.is_not(None))) if folder is not None]
