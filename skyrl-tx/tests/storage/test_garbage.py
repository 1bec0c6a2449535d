"""Garbage collection: rows and folders that are kept or deleted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session, col, select

from tx.errors import ConfigError
from tx.tinker.storage import garbage
from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.database import Database
from tx.tinker.storage.db_models import CheckpointRow, ModelRow, RequestRow, SamplerRow, SessionRow
from tx.tinker.storage.rows import add_row

NOW, TTL, DAY = 1_000_000.0, 3600.0, 86_400.0


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    database = Database(f"sqlite:///{tmp_path / 'tx.db'}")
    database.open()
    with Session(database.writer) as session:
        add_session(session, "open")
        add_session(session, "ended", ended_at=NOW - 2 * TTL)
        add_model(session, "live", snapshot_seq=5)
        add_model(session, "unloaded", status="unloaded")
        yield session
    database.close()


def add_session(session: Session, name: str, **values: Any) -> None:
    add_row(session, SessionRow, session_id=name, tenant="t", created_at=0.0, last_heartbeat_at=0.0, **values)


def add_model(session: Session, name: str, status: str = "live", **values: Any) -> None:
    number = len(session.exec(select(ModelRow.model_id)).all())
    values |= {"train_attn": True, "train_mlp": True, "train_unembed": True, "lora_rank": 8, "lora_seed": 0}
    add_row(session, ModelRow, model_id=name, tenant="t", session_id="open", model_seq_id=number, base_model="b",
            status=status, created_at=0.0, last_request_at=0.0, **values)  # fmt: skip


def add_request(session: Session, name: str, **values: Any) -> None:
    values = {"kind": "train", "status": "done", "completed_at": NOW - 10 * TTL, "delivered_at": NOW - 9 * TTL} | values
    values |= {"payload": f"{name} payload", "result_blob": f"{name} result", "order": b"order"}
    add_row(session, RequestRow, request_id=name, tenant="t", created_at=0.0, **values)


def requests(session: Session) -> list[str]:
    return sorted(session.exec(select(RequestRow.request_id)))


@pytest.mark.parametrize(
    ("kept", "values"),
    [
        (False, {"model_id": "live", "seq": 5}),  # in the snapshot
        (True, {"model_id": "live", "seq": 6}),  # after it: to be replayed
        (False, {"model_id": "unloaded", "seq": 6}),  # a model that never comes back
        (False, {"kind": "sample"}),
        (True, {"kind": "sample", "delivered_at": NOW - TTL / 2}),
        (True, {"kind": "sample", "delivered_at": None}),  # not yet fetched
        (False, {"kind": "sample", "delivered_at": None, "completed_at": NOW - 2 * DAY}),  # nor ever
        (True, {"kind": "sample", "delivered_at": None, "completed_at": None, "status": "pending"}),
    ],
)
def test_delivered_results_are_removed_unless_replay_needs_them(session: Session, kept: bool, values: dict[str, Any]):
    add_request(session, "r", **values)
    expected = (0, []) if kept else (1, ["r payload", "r result"])
    assert garbage.remove_delivered_results(session, NOW, TTL) == expected
    assert requests(session) == (["r"] if kept else [])


def test_payloads_unneeded_by_replay_are_removed_before_results(session: Session):
    add_request(session, "in the snapshot", model_id="live", seq=5, delivered_at=None)
    add_request(session, "after it", model_id="live", seq=6, delivered_at=None)
    add_request(session, "waits", status="pending", delivered_at=None, completed_at=None)
    assert garbage.remove_spent_payloads(session) == (1, ["in the snapshot payload"])
    assert garbage.remove_spent_payloads(session) == (0, [])
    rows = session.exec(select(RequestRow).order_by(col(RequestRow.request_id))).all()
    assert [row.payload for row in rows] == ["after it payload", None, "waits payload"]
    assert [row.order for row in rows] == [b"order", None, b"order"]
    assert rows[1].result_blob == "in the snapshot result"


def test_garbage_collection_bounds_rows_per_call(session: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(garbage, "MOST_AT_ONCE", 2)
    for i in range(5):
        add_request(session, f"{i}")
    counts = [garbage.remove_delivered_results(session, NOW, TTL).num_requests for _ in range(4)]
    assert counts == [2, 2, 1, 0]


def test_unreferenced_blobs_are_found(session: Session, tmp_path: Path):
    blobs = Blobs(tmp_path / "blobs")
    payload, result, left = (blobs.put(b"x") for _ in range(3))
    add_row(session, RequestRow, request_id="r", tenant="t", kind="train", status="done", created_at=0.0,
            payload=payload, result_blob=result)  # fmt: skip
    assert garbage.find_unreferenced_blobs(session, blobs, min_age_seconds=0) == {left}
    assert garbage.find_unreferenced_blobs(session, blobs) == set()  # perhaps its row is on the way


def test_blobs_of_another_database_are_not_taken_for_garbage(session: Session, tmp_path: Path):
    blobs = Blobs(tmp_path / "blobs")
    blobs.claim("another")
    blobs.put(b"x")
    with pytest.raises(ConfigError, match="belong to another database"):
        garbage.find_unreferenced_blobs(session, blobs, min_age_seconds=0)


def add_checkpoint(session: Session, name: str, expires_at: float | None, folder: str) -> None:
    add_row(session, CheckpointRow, model_id="live", kind="sampler_weights", name=name, tenant="t", folder=folder,
            created_at=0.0, expires_at=expires_at)  # fmt: skip


def add_sampler(session: Session, name: str, owner: str, folder: str | None, **values: Any) -> None:
    number = len(session.exec(select(SamplerRow.sampler_id)).all())
    add_row(session, SamplerRow, sampler_id=name, tenant="t", session_id=owner, sampling_session_seq_id=number,
            base_model="b", folder=folder, created_at=0.0, **values)  # fmt: skip


def test_expired_checkpoints_go_with_their_folders(session: Session):
    add_checkpoint(session, "old", NOW - 1, "/old")
    add_checkpoint(session, "young", NOW + 1, "/young")
    add_checkpoint(session, "never expire", None, "/for-ever")
    assert garbage.remove_expired_checkpoints(session, NOW) == ["/old"]
    assert sorted(session.exec(select(CheckpointRow.name))) == ["never expire", "young"]
    assert garbage.list_scheduled_deletions(session) == ["/old"]
    garbage.remove_scheduled_deletion(session, "/old")
    assert garbage.list_scheduled_deletions(session) == []


def test_folder_in_use_by_sampler_is_kept_until_sampler_ends(session: Session):
    add_checkpoint(session, "old", NOW - 1, "/old")
    add_sampler(session, "s", "open", "/old")
    assert garbage.remove_expired_checkpoints(session, NOW) == []
    assert garbage.remove_ended_samplers(session, NOW, TTL) == []
    session.get_one(SessionRow, "open").ended_at = NOW - 2 * TTL
    session.flush()
    assert garbage.remove_ended_samplers(session, NOW, TTL) == ["/old"]


def test_samplers_of_ended_sessions_go_when_they_have_nothing_to_do(session: Session):
    add_checkpoint(session, "named", None, "/named")
    add_sampler(session, "base", "ended", None)
    add_sampler(session, "of a checkpoint", "ended", "/named")
    add_sampler(session, "own", "ended", "/own", ephemeral=True)
    add_sampler(session, "busy", "ended", "/busy", ephemeral=True)
    add_sampler(session, "living", "open", "/living", ephemeral=True)
    add_request(session, "r", status="pending", sampler_id="busy", completed_at=None, delivered_at=None)
    assert garbage.remove_ended_samplers(session, NOW, TTL) == ["/own"]
    assert sorted(session.exec(select(SamplerRow.sampler_id))) == ["busy", "living"]
    assert garbage.remove_ended_samplers(session, NOW, TTL) == []
