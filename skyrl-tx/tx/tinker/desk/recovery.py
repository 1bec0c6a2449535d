"""From rows to what lives: what a new API process has in memory, and what a new engine must do again."""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import RequestError
from tx.tinker.desk.limits import Limits
from tx.tinker.desk.live import Entry, Live, Run, Sampler, Session
from tx.tinker.desk.records import decode_record
from tx.tinker.desk.sequencer import Sequencer
from tx.tinker.engine.messages import CreateModel, Load, Sample
from tx.tinker.storage.db_models import ModelRow, RequestRow, SamplerRow, SchemaRow, SessionRow
from tx.tinker.storage.store import Store
from tx.tinker.types import LoraSpec

log = logging.getLogger(__name__)


def orders_after_snapshot(database: Database, model_id: str) -> list[RequestRow]:
    """Requests of a model that are decided and that its snapshot does not contain, in order. Those whose order is still
    there changed it, and are to be done again."""
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
class Recalled:
    samples: list[Entry]
    """That wait to be done."""
    num_deaths: dict[Entry, int]
    """Of engines, at which requests that wait were under way."""
    died_at_work: bool
    """The server before this one died with its engine."""


async def recall(store: Store, live: Live, limits: Limits) -> Recalled:
    """Fills an empty `live` from the database."""
    rows = await store.read(_read_rows)
    for row in rows.sessions:
        live.sessions[row.session_id] = Session(row.session_id, row.tenant)
    for row in rows.samplers:
        live.samplers[row.sampler_id] = Sampler(
            row.sampler_id, row.tenant, row.session_id, row.base_model, row.model_path, row.folder
        )
    for row in rows.models:
        live.runs[row.model_id] = _run(row)
    by_model: dict[str, list[RequestRow]] = {}
    for row in rows.requests:
        by_model.setdefault(row.model_id or "", []).append(row)
    samples = [_sample_entry(row) for row in by_model.pop("", [])]
    for model_id, requests in by_model.items():
        if model_id in live.runs:
            _recall_requests(live.runs[model_id], requests)
    entries = [*samples, *(entry for run in live.runs.values() for entry in _entries(run))]
    for entry in entries:
        live.pending[entry.request_id] = entry
        live.promise(entry)
        limits.enter(entry.tenant, entry.tokens if entry.kind == "sample" else None)
    log.info(
        "recalled %d sessions, %d models, %d samplers, %d requests to do",
        len(live.sessions), len(live.runs), len(live.samplers), len(live.pending),
    )  # fmt: skip
    num_deaths = {row.request_id: row.num_deaths for row in rows.requests}
    return Recalled(samples, {entry: num_deaths[entry.request_id] for entry in entries}, rows.died_at_work)


class _Rows:
    died_at_work: bool
    sessions: Iterable[SessionRow]
    models: Iterable[ModelRow]
    samplers: Iterable[SamplerRow]
    requests: Iterable[RequestRow]


def _read_rows(database: Database) -> _Rows:
    rows = _Rows()
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
        LoraSpec(
            rank=row.lora_rank,
            seed=row.lora_seed,
            train_attn=row.train_attn,
            train_mlp=row.train_mlp,
            train_unembed=row.train_unembed,
        ),
        sequence=Sequencer(row.snapshot_seq + 1),
        snapshot=row.snapshot,
        snapshot_seq=row.snapshot_seq,
    )


def _recall_requests(run: Run, rows: list[RequestRow]) -> None:
    """Rows of a run: all after its snapshot, and what is pending. What waits for a predecessor gets a fresh wait."""
    now, unload = time.monotonic(), None
    for row in rows:
        entry = _entry(run, row) if row.status == "pending" else None
        if row.status == "done" and row.kind in ("create", "load") and row.order is not None:
            order = decode_record(row.order).order
            if isinstance(order, CreateModel | Load) and order.folder:
                run.needed_folders[order.seq] = order.folder
        if row.seq is None:
            unload = entry
            continue
        if row.status == "refused":
            run.refused[row.seq] = RequestError(row.error or "refused", row.http_status or 400)
        for due in run.sequence.offer(row.seq, entry, now):
            run.queue[due.request_id] = due
    if unload is not None:
        run.queue[unload.request_id] = unload
        run.unloading = asyncio.get_running_loop().create_future()
        run.unloading.set_result(None)


def _entry(run: Run, row: RequestRow) -> Entry:
    record = decode_record(row.order or b"")
    return Entry(row.request_id, row.tenant, row.kind, record, row.payload, run=run, seq=row.seq)


def _sample_entry(row: RequestRow) -> Entry:
    record = decode_record(row.order or b"")
    assert isinstance(record.order, Sample)
    entry = Entry(row.request_id, row.tenant, row.kind, record, sampler_id=row.sampler_id)
    entry.tokens = len(record.order.spec.prompt)
    return entry


def _entries(run: Run) -> list[Entry]:
    return [*run.queue.values(), *run.sequence.waiting()]
