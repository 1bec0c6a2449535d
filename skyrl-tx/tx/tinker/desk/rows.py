"""Units of work on the database that several parts need. A unit runs in the store's thread, in one transaction."""

import time
from collections.abc import Iterable

from sqlalchemy import bindparam, func, insert, select, update
from sqlmodel import Session as Database
from sqlmodel import col

from tx.errors import RequestError
from tx.tinker.desk.live import Entry, request_id_of
from tx.tinker.desk.records import encode_record
from tx.tinker.storage.db_models import ModelRow, RequestRow, SchemaRow

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


def insert_entry(database: Database, entry: Entry) -> None:
    """Raises IntegrityError if it was accepted before."""
    row = {
        "request_id": entry.request_id,
        "tenant": entry.tenant,
        "kind": entry.kind,
        "model_id": entry.run.model_id if entry.run else None,
        "seq": entry.seq,
        "sampler_id": entry.sampler_id,
        "order": encode_record(entry.record),
        "payload": entry.payload_blob,
        "status": "pending",
        "created_at": time.time(),
    }
    database.connection().execute(_INSERT, row)


def finish_entry(database: Database, entry: Entry, body: bytes | None, blob: str | None, *, keep_order: bool) -> None:
    """It is done.

    Args:
        body: its result; or `blob`, where that is
        keep_order: to do it again after a crash
    """
    finish = _FINISH if keep_order else _FINISH_AND_FORGET
    database.connection().execute(finish, {"key": entry.request_id, "now": time.time(), "body": body, "blob": blob})


def insert_refusal(database: Database, tenant: str, model_id: str, seq: int, refusal: RequestError) -> None:
    """A seq that is used up without being done. Whoever asks again is told the same, after a restart too."""
    now = time.time()
    database.execute(
        insert(RequestRow).values(
            request_id=request_id_of(model_id, seq),
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


def fail_entries(
    database: Database, entries: Iterable[Entry], error: str, category: str, *, keep_order: bool = False
) -> None:
    """They failed; after a restart they are not done again, unless `keep_order`."""
    values: dict[str, object] = {"status": "failed", "error": error, "category": category, "completed_at": time.time()}
    if not keep_order:
        values |= {"order": None, "payload": None}
    ids = [entry.request_id for entry in entries]
    database.execute(update(RequestRow).where(col(RequestRow.request_id).in_(ids)).values(**values))


def forget_orders(database: Database, model_id: str, up_to_seq: int | None = None) -> list[str]:
    """Drops what is needed no more to bring a model back. Returns blobs that may go after the commit."""
    rows = col(RequestRow.model_id) == model_id
    if up_to_seq is not None:
        rows &= col(RequestRow.seq) <= up_to_seq
    blobs = database.scalars(select(col(RequestRow.payload)).where(rows, col(RequestRow.payload).is_not(None))).all()
    database.execute(
        update(RequestRow).where(rows, col(RequestRow.status) != "pending").values(order=None, payload=None)
    )
    return [blob for blob in blobs if blob is not None]


def touch_model(database: Database, model_id: str, **values: object) -> None:
    database.execute(update(ModelRow).where(col(ModelRow.model_id) == model_id).values(**values))


def set_at_work(database: Database, at_work: bool) -> None:
    """Whether a death from now on is one that nobody may live to write down."""
    database.execute(update(SchemaRow).values(engine_at_work=at_work))


def record_deaths(database: Database, num_deaths: dict[str, int]) -> None:
    """The engine died.

    Args:
        num_deaths: by request id, at how many deaths it was under way
    """
    set_at_work(database, False)
    if num_deaths:
        statement = update(_requests).where(_requests.c.request_id == bindparam("key"))
        rows = [{"key": request_id, "number": number} for request_id, number in num_deaths.items()]
        database.connection().execute(statement.values(num_deaths=bindparam("number")), rows)


def num_pending(database: Database, model_id: str, up_to_seq: int) -> int:
    """Requests of a model up to a seq that are accepted and not done."""
    rows = (
        col(RequestRow.model_id) == model_id,
        col(RequestRow.seq) <= up_to_seq,
        col(RequestRow.status) == "pending",
    )
    return database.scalar(select(func.count()).select_from(RequestRow).where(*rows)) or 0
