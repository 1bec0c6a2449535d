"""Database units of several parts. A unit runs in the store's thread, in one transaction."""

import time
from collections.abc import Iterable

from sqlalchemy import bindparam, func, insert, select, update
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import RequestError
from tx.tinker.service.state import PendingRequest
from tx.tinker.storage.db_models import RequestRow, SchemaRow
from tx.tinker.types import format_request_id

_requests = RequestRow.metadata.tables["requests"]
_INSERT = insert(_requests)
_FINISH = (
    update(_requests)
    .where(_requests.c.request_id == bindparam("key"))
    .values(
        status="done",
        completed_at=bindparam("now"),
        result=bindparam("body"),
        result_blob=bindparam("blob"),
    )
)
_FINISH_AND_FORGET = _FINISH.values(order=None, payload=None)
# Statements made once and run on the bare connection: two of them are what a sample costs here.


def insert_request(database: Database, pending: PendingRequest) -> None:
    """Insert a pending request. Raises: IntegrityError for a repetition."""
    row = {
        "request_id": pending.request_id,
        "tenant": pending.tenant,
        "kind": pending.kind,
        "model_id": pending.run.model_id if pending.run else None,
        "seq": pending.seq,
        "sampler_id": pending.sampler_id,
        "order": pending.stored.encode(),
        "payload": pending.payload_blob,
        "content": pending.content,
        "status": "pending",
        "created_at": time.time(),
    }
    database.connection().execute(_INSERT, row)


def finish_request(
    database: Database, pending: PendingRequest, body: bytes | None, blob: str | None, *, keep_command: bool
) -> None:
    """Mark a request done.

    Args:
        body: its result; or `blob`, where that is
        keep_command: replay it after a crash
    """
    finish = _FINISH if keep_command else _FINISH_AND_FORGET
    database.connection().execute(finish, {"key": pending.request_id, "now": time.time(), "body": body, "blob": blob})


def insert_refusal(database: Database, tenant: str, model_id: str, seq: int, refusal: RequestError) -> None:
    """Record a refusal, which uses up its seq; repetitions get the same error, after a restart too."""
    now = time.time()
    database.execute(
        insert(RequestRow).values(
            request_id=format_request_id(model_id, seq),
            tenant=tenant,
            kind="refused",
            model_id=model_id,
            seq=seq,
            status="refused",
            error=str(refusal),
            category="user",
            http_status=refusal.status,
            created_at=now,
            completed_at=now,
        )
    )


def fail_requests(
    database: Database,
    pending_requests: Iterable[PendingRequest],
    error: str,
    category: str,
    *,
    keep_command: bool = False,
) -> None:
    """Mark requests failed; `keep_command` replays them after a restart."""
    values: dict[str, object] = {"status": "failed", "error": error, "category": category, "completed_at": time.time()}
    if not keep_command:
        values |= {"order": None, "payload": None}
    ids = [pending.request_id for pending in pending_requests]
    database.execute(update(RequestRow).where(col(RequestRow.request_id).in_(ids)).values(**values))


def set_at_work(database: Database, at_work: bool) -> None:
    """Record that the engine has work: a crash of both processes from now on is counted at the next start."""
    database.execute(update(SchemaRow).values(engine_at_work=at_work))


def record_deaths(database: Database, num_deaths: dict[str, int]) -> None:
    """Record the crashes that each request was running at.

    Args:
        num_deaths: number of crashes during each request, by id
    """
    set_at_work(database, False)
    if num_deaths:
        statement = update(_requests).where(_requests.c.request_id == bindparam("key"))
        rows = [{"key": request_id, "number": number} for request_id, number in num_deaths.items()]
        database.connection().execute(statement.values(num_deaths=bindparam("number")), rows)


def count_pending(database: Database, model_id: str, up_to_seq: int) -> int:
    """Count the pending requests of a model up to a seq."""
    rows = (
        col(RequestRow.model_id) == model_id,
        col(RequestRow.seq) <= up_to_seq,
        col(RequestRow.status) == "pending",
    )
    return database.scalar(select(func.count()).select_from(RequestRow).where(*rows)) or 0
