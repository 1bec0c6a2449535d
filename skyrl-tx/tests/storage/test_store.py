"""Units, groups, reads, and errors when the database fails. On sqlite and PostgreSQL."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlmodel import Session
from stores import names, opened

from tx.tinker.storage.blobs import Blobs
from tx.tinker.storage.db_models import ModelRow, RequestRow, SessionRow
from tx.tinker.storage.rows import add_row
from tx.tinker.storage.store import Store, StoreError

SQLITE = pytest.mark.parametrize("url", ["sqlite"], indirect=True)


def add(name: str) -> Callable[[Session], None]:
    """A unit that adds a session of this name."""

    def unit(session: Session) -> None:
        session.add(SessionRow(session_id=name, tenant="local", created_at=0.0, last_heartbeat_at=0.0))

    return unit


class Held:
    """Unit that blocks the writer until released, so that later writes form one group."""

    def __init__(self) -> None:
        self.running, self.go = threading.Event(), threading.Event()

    def __call__(self, session: Session) -> None:
        self.running.set()
        assert self.go.wait(30)

    async def begin(self, store: Store) -> asyncio.Task[None]:
        task = asyncio.create_task(store.write(self))
        await asyncio.to_thread(self.running.wait, 30)
        return task


async def write_as_one_group(store: Store, *units: Callable[[Session], Any]) -> list[Any]:
    held = Held()
    first = await held.begin(store)
    tasks = [asyncio.create_task(store.write(unit)) for unit in units]
    await asyncio.sleep(0)
    held.go.set()
    await asyncio.gather(first, return_exceptions=True)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_rows_round_trip_with_sql_defaults_and_64_bit_integers(store: Store):
    def unit(session: Session) -> SessionRow:
        add_row(session, SessionRow, session_id="b", tenant="local", created_at=0.0, last_heartbeat_at=0.0)
        add_row(session, RequestRow, request_id="r", tenant="t", kind="sample", status="done", created_at=0.0,
                model_id="m", seq=2**63 - 1)  # fmt: skip
        add("a")(session)
        session.flush()
        return session.get_one(SessionRow, "a")

    assert (await store.write(unit)).tags == []
    made, added = [await store.read(lambda session, name=name: session.get_one(SessionRow, name)) for name in "ab"]
    assert made.tenant == added.tenant == "local"
    assert (added.tags, added.sdk_version, added.user_metadata, added.ended_at) == ([], "", None, None)
    assert (await store.read(lambda session: session.get_one(RequestRow, "r"))).seq == 2**63 - 1


async def test_units_run_in_call_order_and_see_earlier_ones(store: Store):
    def count(session: Session) -> int:
        number = len(names(session))
        add(f"{number:03}")(session)
        return number

    assert await asyncio.gather(*(store.write(count) for _ in range(200))) == list(range(200))


async def test_waiting_units_share_commit(store: Store):
    commits = []
    event.listen(store._database.writer, "commit", commits.append)
    await write_as_one_group(store, *(add(f"{i}") for i in range(100)))
    assert len(commits) == 1
    assert len(await store.read(names)) == 100


async def test_failing_unit_is_rolled_back_alone(store: Store):
    def fails_late(session: Session) -> None:
        add("b")(session)
        session.flush()
        raise KeyError("reason")

    _, late, taken, _ = await write_as_one_group(store, add("a"), fails_late, add("a"), add("c"))
    assert isinstance(late, KeyError)
    assert isinstance(taken, IntegrityError)
    assert await store.read(names) == ["a", "c"]


async def test_row_built_by_caller_survives_failing_unit_in_group(store: Store):
    """The failure undoes the whole group, and all of it runs again with the same row."""
    row = SessionRow(session_id="mine", tenant="local", created_at=0.0, last_heartbeat_at=0.0)
    runs = []

    def mine(session: Session) -> None:
        runs.append(1)
        session.add(row)

    _, taken = await write_as_one_group(store, mine, add("mine"))
    assert isinstance(taken, IntegrityError)
    assert len(runs) == 2 and await store.read(names) == ["mine"]


async def test_savepoint_within_unit_may_fail(store: Store):
    def unit(session: Session) -> str:
        add("new")(session)
        session.flush()
        try:
            with session.begin_nested():
                session.execute(text("INSERT INTO sessions (session_id) VALUES ('new')"))
        except IntegrityError:
            return "was there"
        return "was not"

    assert await store.write(unit) == "was there"
    assert await store.read(names) == ["new"]


async def test_unit_hiding_error_is_reported(store: Store):
    def unit(session: Session) -> None:
        add("a")(session)
        session.flush()
        session.expunge_all()
        add("a")(session)
        try:
            session.flush()
        except IntegrityError:
            return  # and "a" is rolled back too

    with pytest.raises(RuntimeError, match="begin_nested"):
        await store.write(unit)
    assert await store.read(names) == []


@pytest.mark.parametrize("end", [Session.commit.__name__, Session.rollback.__name__])
async def test_unit_cannot_end_transaction(store: Store, end: str):
    with pytest.raises(RuntimeError, match="must not"):
        await store.write(lambda session: getattr(session, end)())


async def test_unit_may_raise_any_exception(store: Store):
    with pytest.raises(RuntimeError, match="StopIteration"):
        await store.write(lambda _: next(iter(())))
    with pytest.raises(SystemExit):
        await store.write(lambda _: exit(3))
    await store.write(add("after"))


@SQLITE
async def test_failed_commit_fails_only_own_group(store: Store):
    def orphan(session: Session) -> None:  # its missing session is found at the commit
        session.execute(text("PRAGMA defer_foreign_keys=ON"))
        values = {"lora_rank": 8, "lora_seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
        times = {"created_at": 0.0, "last_request_at": 0.0}
        add_row(session, ModelRow, model_id="m", tenant="t", session_id="none", model_seq_id=0, base_model="b",
                status="live", **values, **times)  # fmt: skip

    results = await write_as_one_group(store, add("a"), orphan, add("b"))
    assert [type(result) for result in results] == [StoreError] * 3
    assert "was not applied" in str(results[0]) and "FOREIGN KEY" in str(results[0])
    await store.write(add("c"))
    assert await store.read(names) == ["c"]


@SQLITE
async def test_full_disk_is_reported_and_recoverable(store: Store):
    def pages(session: Session) -> int:
        return session.execute(text("PRAGMA page_count")).scalar_one()

    def limit(count: int) -> Callable[[Session], Any]:
        return lambda session: session.execute(text(f"PRAGMA max_page_count={count}"))

    def large(session: Session) -> None:
        add_row(session, RequestRow, request_id="r", tenant="t", kind="train", status="done", created_at=0.0,
                result=b"x" * 1_000_000)  # fmt: skip

    await store.write(limit(await store.write(pages) + 5))
    results = await write_as_one_group(store, add("a"), large, add("b"))
    assert any("full" in str(result) for result in results)
    for name, result in zip("ab", (results[0], results[2]), strict=True):  # reported as committed or not
        assert (result is None) == (name in await store.read(names))
    await store.write(limit(1_000_000))
    await store.write(large)


async def test_cancelled_caller_leaves_complete_unit(store: Store):
    held = Held()
    first = await held.begin(store)

    def two(session: Session) -> None:
        add("a")(session)
        add("b")(session)

    task = asyncio.create_task(store.write(two))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.go.set()
    await first
    await store.write(lambda _: None)
    assert await store.read(names) == ["a", "b"]


async def test_callers_wait_for_room(url: str):
    async with opened(url, max_waiting=4) as store:
        held = Held()
        first = await held.begin(store)
        tasks = [asyncio.create_task(store.write(add(f"{i:02}"))) for i in range(20)]
        await asyncio.sleep(0.05)
        assert store._units.qsize() == 3  # and the one that is held
        tasks[10].cancel()  # had no room yet: it never was
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(first, *tasks, return_exceptions=True)
        assert await store.read(names) == [f"{i:02}" for i in range(20) if i != 10]


async def test_reads_do_not_wait_for_writer(store: Store):
    await store.write(add("a"))
    held = Held()

    def unit(session: Session) -> None:
        add("b")(session)
        session.flush()
        held(session)

    task = asyncio.create_task(store.write(unit))
    await asyncio.to_thread(held.running.wait, 30)
    assert await asyncio.wait_for(store.read(names), 5) == ["a"]
    held.go.set()
    await task
    assert await store.read(names) == ["a", "b"]


async def test_read_sees_consistent_snapshot(store: Store):
    between, go = threading.Event(), threading.Event()

    def twice(session: Session) -> tuple[list[str], list[str]]:
        before = names(session)
        between.set()
        assert go.wait(30)
        return before, names(session)

    read = asyncio.create_task(store.read(twice))
    await asyncio.to_thread(between.wait, 30)
    await store.write(add("a"))
    go.set()
    assert await read == ([], [])


async def test_read_cannot_write(store: Store):
    def unit(session: Session) -> None:
        add("a")(session)
        session.flush()

    with pytest.raises(SQLAlchemyError, match=r"read-?only"):
        await store.read(unit)


async def test_close_finishes_started_units_and_refuses_rest(url: str):
    store = Store(url, max_waiting=50)
    await store.start()
    tasks = [asyncio.create_task(store.write(add(f"{i}"))) for i in range(80)]
    await asyncio.sleep(0)
    await store.close()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert results[:50] == [None] * 50
    assert [type(result) for result in results[50:]] == [StoreError] * 30
    with pytest.raises(StoreError, match="not open"):
        await store.write(add("late"))
    with pytest.raises(StoreError, match="not open"):
        await store.read(names)
    async with opened(url) as again:
        assert len(await again.read(names)) == 50
        assert again.database_id == store.database_id


def test_event_loop_ending_without_close_hangs_no_caller(url: str):
    tasks = []

    async def forget() -> Store:
        store = Store(url)
        await store.start()
        for i in range(50):
            tasks.append(asyncio.create_task(store.write(add(f"{i}"))))
        await asyncio.sleep(0)
        return store

    store = asyncio.run(forget())
    asyncio.run(store.close())
    asyncio.run(store.close())


@pytest.mark.process
async def test_store_serves_thousand_callers_next_to_megabytes(store: Store, tmp_path: Path):
    """Large data is stored beside the rows (`blobs.py`), so it does not delay them in the queue."""
    blobs = Blobs(tmp_path / "blobs")

    async def request(name: str, blob: str | None = None) -> float:
        started = time.perf_counter()
        values = {"tenant": "t", "kind": "train", "status": "done", "created_at": 0.0, "order": bytes(300)}
        await store.write(lambda session: add_row(session, RequestRow, request_id=name, payload=blob, **values))
        return time.perf_counter() - started

    async def large(name: str) -> None:
        await request(name, await asyncio.to_thread(blobs.put, bytes(3_000_000)))

    started = time.perf_counter()
    await asyncio.gather(*(request(f"small{i}") for i in range(1000)))
    print(f"\n{1000 / (time.perf_counter() - started):.0f} units/s")

    large_ones = asyncio.gather(*(large(f"large{i}") for i in range(64)))
    waits = []
    while not large_ones.done():
        waits.append(await request(f"beside{len(waits)}"))
    await large_ones
    print(f"beside 64 of 3 MB: median {sorted(waits)[len(waits) // 2] * 1e3:.1f} ms, longest {max(waits) * 1e3:.1f} ms")
    assert sorted(waits)[len(waits) // 2] < 5.0
