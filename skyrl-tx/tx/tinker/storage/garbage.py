"""Garbage collection of database rows and files such that a crash in between leaves no orphans.

Rows go first, in a unit of `Store.write`; what each function returns may then be deleted from disk. Blobs left by a
crash are found by `find_unreferenced_blobs`; folders are listed as scheduled deletions from the transaction that
removed their last row until they are deleted (checkpoints-base may be shared, so it is never searched).

    while (forgotten := await store.write(lambda session: remove_delivered_results(session, now, ttl))).num_requests:
        for blob in forgotten.blobs:
            blobs.drop(blob)

    await store.write(lambda session: remove_expired_checkpoints(session, now))
    for folder in await store.read(list_scheduled_deletions):
        folders.remove(folder)
        await store.write(lambda session: remove_scheduled_deletion(session, folder))
"""

from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, exists, or_, select, update
from sqlmodel import Session

from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import (
    CheckpointRow,
    ModelRow,
    RequestRow,
    SamplerRow,
    ScheduledDeletionRow,
    SchemaRow,
    SessionRow,
)
from tx.tinker.storage.rows import get_table

_requests, _models, _samplers = get_table(RequestRow), get_table(ModelRow), get_table(SamplerRow)
_checkpoints, _sessions, _scheduled_deletions = (
    get_table(CheckpointRow),
    get_table(SessionRow),
    get_table(ScheduledDeletionRow),
)

MOST_AT_ONCE = 250
"""Maximum number of rows per call, a few hundredths of a second: other units wait for it."""
ABANDONED_SECONDS = 24 * 3600.0
"""A result that was not fetched is kept for this time, or for the ttl if that is longer."""


class Forgotten(NamedTuple):
    """Requests forgotten by one call."""

    num_requests: int
    """0: nothing to do for now."""
    blobs: list[str]
    """Blobs that may be deleted from disk after the commit."""


def find_unreferenced_blobs(session: Session, blobs: Blobs, min_age_seconds: float = 3600.0) -> set[str]:
    """Find blobs that no row references: left by a crash, or with a row still to be written. Only age distinguishes
    these, so pass 0 only at the start, before requests are accepted.

    Raises:
        ConfigError: the blobs belong to another database.
    """
    blobs.claim(session.scalars(select(get_table(SchemaRow).c.database_id)).one())
    found = blobs.all(min_age_seconds)
    for column in (_requests.c.payload, _requests.c.result_blob):
        found.difference_update(session.scalars(select(column).where(column.is_not(None))))
    return found


def remove_delivered_results(session: Session, now: float, ttl: float) -> Forgotten:
    """Remove requests with results fetched more than `ttl` seconds ago, or not fetched for a day, unless needed for
    replay after a crash.
    """
    fetched = _requests.c.delivered_at < now - ttl
    unwanted = and_(_requests.c.delivered_at.is_(None), _requests.c.completed_at < now - max(ttl, ABANDONED_SECONDS))
    rows = session.execute(
        select(_requests.c.request_id, _requests.c.payload, _requests.c.result_blob)
        .where(or_(fetched, unwanted), _requests.c.status != "pending", ~_is_needed_for_replay())
        .limit(MOST_AT_ONCE)
    ).all()
    session.execute(delete(_requests).where(_requests.c.request_id.in_([row.request_id for row in rows])))
    return Forgotten(len(rows), [blob for _, *blobs in rows for blob in blobs if blob is not None])


def remove_spent_payloads(session: Session) -> Forgotten:
    """Forget command and payload of completed requests that no replay needs; keep their results."""
    rows = session.execute(
        select(_requests.c.request_id, _requests.c.payload)
        .where(_requests.c.order.is_not(None), _requests.c.status != "pending", ~_is_needed_for_replay())
        .limit(MOST_AT_ONCE)
    ).all()
    ids = [row.request_id for row in rows]
    session.execute(update(_requests).where(_requests.c.request_id.in_(ids)).values(order=None, payload=None))
    return Forgotten(len(rows), [row.payload for row in rows if row.payload is not None])


def remove_expired_checkpoints(session: Session, now: float) -> list[str]:
    """Remove checkpoints with expired TTL.

    Returns:
        folders scheduled for deletion; a folder used by a sampler is kept until the sampler is removed
    """
    key = (_checkpoints.c.model_id, _checkpoints.c.kind, _checkpoints.c.name)
    rows = session.execute(
        select(*key, _checkpoints.c.folder).where(_checkpoints.c.expires_at < now).limit(MOST_AT_ONCE)
    ).all()
    for model_id, kind, name, _ in rows:
        session.execute(delete(_checkpoints).where(key[0] == model_id, key[1] == kind, key[2] == name))
    return schedule_deletion(session, (row.folder for row in rows), now)


def remove_ended_samplers(session: Session, now: float, ttl: float) -> list[str]:
    """Remove samplers without pending requests whose session ended more than `ttl` seconds ago.

    Returns:
        unused folders, scheduled for deletion
    """
    working = exists().where(_requests.c.sampler_id == _samplers.c.sampler_id, _requests.c.status == "pending")
    ended = (
        select(_samplers.c.sampler_id)
        .join(_sessions, _sessions.c.session_id == _samplers.c.session_id)
        .where(_sessions.c.ended_at < now - ttl, ~working)
        .limit(MOST_AT_ONCE)
    )
    return remove_samplers(session, list(session.scalars(ended)), now)


def remove_samplers(session: Session, sampler_ids: list[str], now: float) -> list[str]:
    """Forget samplers. Returns: unused folders, scheduled for deletion."""
    these = _samplers.c.sampler_id.in_(sampler_ids)
    folders = list(session.scalars(select(_samplers.c.folder).where(these, _samplers.c.folder.is_not(None))))
    session.execute(delete(_samplers).where(these))
    return schedule_deletion(session, folders, now)


def schedule_deletion(session: Session, candidates: Iterable[str], now: float) -> list[str]:
    """Schedule the deletion of folders, except those that a row still names.

    Returns:
        those noted
    """
    folders = set(candidates)
    for column in (_checkpoints.c.folder, _samplers.c.folder, _models.c.snapshot, _scheduled_deletions.c.folder):
        if folders:
            folders.difference_update(session.scalars(select(column).where(column.in_(folders))).all())
    if folders:
        session.execute(
            _scheduled_deletions.insert(), [{"folder": folder, "doomed_at": now} for folder in sorted(folders)]
        )
    return sorted(folders)


def list_scheduled_deletions(session: Session) -> list[str]:
    """Return the folders scheduled for deletion, oldest first."""
    return list(session.scalars(select(_scheduled_deletions.c.folder).order_by(_scheduled_deletions.c.doomed_at)))


def remove_scheduled_deletion(session: Session, folder: str) -> None:
    """Forget a deleted folder."""
    session.execute(delete(_scheduled_deletions).where(_scheduled_deletions.c.folder == folder))


def _is_needed_for_replay() -> ColumnElement[bool]:
    """Requests that a model runs again after a crash: those after its last snapshot."""
    return exists().where(
        _models.c.model_id == _requests.c.model_id,
        _models.c.status == "live",
        _requests.c.seq > _models.c.snapshot_seq,
    )
