"""Recovery of memory from the database: state of a new API process, and commands that a new engine replays."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from sqlalchemy import or_, select
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import RequestError
from tx.tinker.commands import ModelCommand, Sample, StoredCommand
from tx.tinker.service.limits import Limits
from tx.tinker.service.sequencer import Sequencer
from tx.tinker.service.state import PendingRequest, Run, Sampler, ServerState, Session
from tx.tinker.storage.db_models import ModelRow, RequestRow, SamplerRow, SchemaRow, SessionRow
from tx.tinker.storage.store import Store

log = logging.getLogger(__name__)


def find_commands_after_snapshot(database: Database, model_id: str) -> list[RequestRow]:
    """Return the decided requests after a model's snapshot, in order. Those that still have a command changed the model
    and are replayed."""
    rows = (
        select(RequestRow)
        .join(ModelRow, col(ModelRow.model_id) == col(RequestRow.model_id))
        .where(
            col(RequestRow.model_id) == model_id,
            col(RequestRow.seq) > col(ModelRow.snapshot_seq),
            col(RequestRow.status).in_(["done", "failed"]),
        )
        .order_by(col(RequestRow.seq))
    )
    return list(database.scalars(rows))


@dataclass
class RestoredRequests:
    """Pending work found in the database."""

    samples: list[PendingRequest]
    """Pending samples."""
    num_deaths: dict[PendingRequest, int]
    """Engine crashes at which each pending request was running."""
    died_at_work: bool
    """The previous server crashed together with its engine."""


async def restore(store: Store, state: ServerState, limits: Limits) -> RestoredRequests:
    """Fill an empty `state` from the database."""
    rows = await store.read(_read_rows)
    for row in rows.sessions:
        state.sessions[row.session_id] = Session(row.session_id, row.tenant)
    for row in rows.samplers:
        state.samplers[row.sampler_id] = Sampler.of(row)
    for row in rows.models:
        state.runs[row.model_id] = _run(row)
    by_model: dict[str, list[RequestRow]] = {}
    for row in rows.requests:
        by_model.setdefault(row.model_id or "", []).append(row)
    samples = [_sample_entry(row) for row in by_model.pop("", [])]
    for model_id, requests in by_model.items():
        if model_id in state.runs:
            _restore_requests(state.runs[model_id], requests)
    of_runs = [[*run.queue.values(), *run.sequence.waiting()] for run in state.runs.values()]
    pending_requests = [*samples, *chain(*of_runs)]
    for pending in pending_requests:
        state.pending[pending.request_id] = pending
        state.promise(pending)
        limits.enter(pending.tenant, pending.tokens if pending.kind == "sample" else None)
    log.info(
        "restored %d sessions, %d models, %d samplers, %d pending requests",
        len(state.sessions), len(state.runs), len(state.samplers), len(state.pending),
    )  # fmt: skip
    num_deaths = {row.request_id: row.num_deaths for row in rows.requests}
    return RestoredRequests(
        samples, {pending: num_deaths[pending.request_id] for pending in pending_requests}, rows.died_at_work
    )


class _RestoredRows:
    died_at_work: bool
    sessions: Iterable[SessionRow]
    models: Iterable[ModelRow]
    samplers: Iterable[SamplerRow]
    requests: Iterable[RequestRow]


def _read_rows(database: Database) -> _RestoredRows:
    rows = _RestoredRows()
    rows.died_at_work = bool(database.scalar(select(col(SchemaRow.engine_at_work))))
    rows.sessions = database.scalars(select(SessionRow).where(col(SessionRow.ended_at).is_(None))).all()
    rows.models = database.scalars(select(ModelRow).where(col(ModelRow.status) == "live")).all()
    rows.samplers = database.scalars(
        select(SamplerRow)
        .join(SessionRow, col(SessionRow.session_id) == col(SamplerRow.session_id))
        .where(col(SessionRow.ended_at).is_(None))
    ).all()
    after_snapshot = (col(ModelRow.status) == "live") & (col(RequestRow.seq) > col(ModelRow.snapshot_seq))
    rows.requests = database.scalars(
        select(RequestRow)
        .outerjoin(ModelRow, col(ModelRow.model_id) == col(RequestRow.model_id))
        .where(or_(col(RequestRow.status) == "pending", after_snapshot))
        .order_by(col(RequestRow.seq))
    ).all()
    return rows


def _run(row: ModelRow) -> Run:
    return Run(
        row.model_id,
        row.tenant,
        row.session_id,
        row.base_model,
        row.lora,
        sequence=Sequencer(row.snapshot_seq + 1),
        snapshot=row.snapshot,
        snapshot_seq=row.snapshot_seq,
    )


def _restore_requests(run: Run, rows: list[RequestRow]) -> None:
    """Restore a model's requests: all rows after its snapshot, and pending ones. Timeouts for missing predecessors
    restart.
    """
    now, unload = time.monotonic(), None
    for row in rows:
        pending = _build_entry(run, row) if row.status == "pending" else None
        if row.status == "done" and row.kind in ("create", "load") and row.order is not None:
            command = StoredCommand.decode(row.order).command
            if isinstance(command, ModelCommand) and command.source_folder:
                run.needed_folders[command.seq] = command.source_folder
        if row.seq is None:
            unload = pending
            continue
        if row.status == "refused":
            run.refused[row.seq] = RequestError(row.error or "refused", row.http_status or 400)
        for due in run.sequence.offer(row.seq, pending, now):
            run.queue[due.request_id] = due
    if unload is not None:
        run.queue[unload.request_id] = unload
        run.unloading = asyncio.get_running_loop().create_future()
        run.unloading.set_result(None)


def _build_entry(run: Run, row: RequestRow) -> PendingRequest:
    stored = StoredCommand.decode(row.order or b"")
    return PendingRequest(row.request_id, row.tenant, row.kind, stored, payload_blob=row.payload, run=run, seq=row.seq)


def _sample_entry(row: RequestRow) -> PendingRequest:
    stored = StoredCommand.decode(row.order or b"")
    assert isinstance(stored.command, Sample)
    pending = PendingRequest(row.request_id, row.tenant, row.kind, stored, sampler_id=row.sampler_id)
    pending.tokens = len(stored.command.spec.prompt)
    return pending
