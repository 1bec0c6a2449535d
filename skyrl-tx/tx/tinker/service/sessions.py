"""Client sessions. The time of a heartbeat, or of any other request of a session, is kept in memory and written every
few seconds, all in one transaction."""

import asyncio
import logging
import secrets
import time
from functools import partial

from sqlalchemy import select, update
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import RequestError
from tx.tinker.service.dispatch import Dispatch
from tx.tinker.service.intake import RequestIntake
from tx.tinker.service.state import ServerState, Session
from tx.tinker.storage.db_models import ModelRow, SamplerRow, SessionRow
from tx.tinker.storage.store import Store
from tx.tinker.wire import schemas

log = logging.getLogger(__name__)


class Sessions:
    """Sessions of clients, in memory and in the database."""

    def __init__(self, store: Store, state: ServerState, intake: RequestIntake, dispatch: Dispatch):
        self._store, self._state, self._intake, self._dispatch = store, state, intake, dispatch
        self._refused_at: dict[str, float] = {}
        """Time of the last request refused unread, by tenant."""

    async def create(self, tenant: str, request: schemas.CreateSessionRequest) -> dict[str, object]:
        """Create a session."""
        session_id, now = f"session_{secrets.token_hex(8)}", time.time()
        row = SessionRow(
            session_id=session_id,
            tenant=tenant,
            tags=request.tags,
            user_metadata=request.user_metadata,
            sdk_version=request.sdk_version or "",
            project_id=request.project_id,
            display_name=request.display_name,
            created_at=now,
            last_heartbeat_at=now,
        )
        await self._store.write(lambda database: database.add(row))
        self._state.sessions[session_id] = Session(session_id, tenant)
        return {"type": "create_session", "session_id": session_id}

    async def heartbeat(self, tenant: str, session_id: str) -> dict[str, object]:
        """Keep a session alive. Raises: RequestError 404 if unknown, 410 if it ended."""
        session = self._state.sessions.get(session_id)
        if session is None or session.tenant != tenant or session.ending is not None:
            await self._build_row(tenant, session_id)
            raise RequestError(f"session_id {session_id!r} has ended", 410)
        session.touch()
        return {"type": "session_heartbeat"}

    def keep_all(self, tenant: str) -> None:
        """Count something refused unread as a heartbeat of each of the tenant's sessions."""
        self._refused_at[tenant] = time.monotonic()

    async def finish(self, tenant: str, session_id: str) -> dict[str, object]:
        """End a session, unless it has ended already."""
        session = self._state.sessions.get(session_id)
        if session is None or session.tenant != tenant:
            await self._build_row(tenant, session_id)
        else:
            await self.end(session, "finished")
        return {"type": "finish_session", "session_id": session_id}

    async def end(self, session: Session, reason: str) -> None:
        """End a session: remove its samplers at once, and unload its models after their accepted requests."""
        if session.ending is None:
            session.ending = asyncio.create_task(self._close_session(session, reason))
        await asyncio.shield(session.ending)

    async def finish_endings(self) -> None:
        """Unload models of sessions that ended just before the previous server stopped."""
        for run in list(self._state.runs.values()):
            if run.session_id not in self._state.sessions and run.unloading is None:
                await self._intake.unload(run)

    def expired(self, timeout: float) -> list[Session]:
        """Return sessions without any request for `timeout` seconds."""
        oldest = time.monotonic() - timeout
        kept = {tenant for tenant, at in self._refused_at.items() if at >= oldest}
        late = [s for s in self._state.sessions.values() if s.last_heartbeat < oldest and s.ending is None]
        return [session for session in late if session.tenant not in kept]

    async def list(self, tenant: str, limit: int = 20, offset: int = 0) -> dict[str, object]:
        """List a page of the tenant's session ids, newest first."""
        newest_first = (
            select(col(SessionRow.session_id))
            .where(col(SessionRow.tenant) == tenant)
            .order_by(col(SessionRow.created_at).desc(), col(SessionRow.session_id))
            .limit(limit)
            .offset(offset)
        )
        return {"sessions": await self._store.read(lambda database: list(database.scalars(newest_first)))}

    async def get(self, tenant: str, session_id: str) -> dict[str, object]:
        """Describe a session with its runs and samplers. Raises: RequestError 404."""
        row = await self._build_row(tenant, session_id)

        def unit(database: Database) -> tuple[list[str], list[str]]:
            runs = select(col(ModelRow.model_id)).where(col(ModelRow.session_id) == session_id)
            samplers = select(col(SamplerRow.sampler_id)).where(col(SamplerRow.session_id) == session_id)
            return (
                list(database.scalars(runs.order_by(col(ModelRow.model_seq_id)))),
                list(database.scalars(samplers.order_by(col(SamplerRow.sampling_session_seq_id)))),
            )

        runs, samplers = await self._store.read(unit)
        return {
            "training_run_ids": runs,
            "sampler_ids": samplers,
            "user_metadata": row.user_metadata,
            "display_name": row.display_name,
        }

    async def _build_row(self, tenant: str, session_id: str) -> SessionRow:
        row = await self._store.read(lambda database: database.get(SessionRow, session_id))
        if row is None or row.tenant != tenant:
            raise RequestError(f"session_id {session_id!r} is unknown", 404)
        return row

    async def _close_session(self, session: Session, reason: str) -> None:
        await self._store.write(partial(_record_end, session_id=session.session_id, reason=reason))
        self._state.sessions.pop(session.session_id, None)
        samplers = {s.sampler_id for s in self._state.samplers.values() if s.session_id == session.session_id}
        for sampler_id in samplers:
            del self._state.samplers[sampler_id]
        await self._dispatch.cancel_samples(samplers, f"not executed: the session {reason}")
        for run in [run for run in self._state.runs.values() if run.session_id == session.session_id]:
            await self._intake.unload(run)
        log.info("session %s %s", session.session_id, reason)


def _record_end(database: Database, session_id: str, reason: str) -> None:
    database.execute(
        update(SessionRow)
        .where(col(SessionRow.session_id) == session_id)
        .values(ended_at=time.time(), end_reason=reason)
    )
