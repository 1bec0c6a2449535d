"""URLs, one server per database, versions, and loss of the PostgreSQL server."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.schema import CreateTable
from sqlmodel import Session
from stores import names, opened

from tx.errors import ConfigError
from tx.tinker.storage.database import Database, parse_url
from tx.tinker.storage.db_models import SCHEMA_VERSION, Row, SessionRow
from tx.tinker.storage.rows import add_row
from tx.tinker.storage.store import Store, StoreError

TABLES_OF_VERSION_3 = "e5fda4f7"


def add(name: str) -> Any:
    return lambda session: add_row(
        session, SessionRow, session_id=name, tenant="local", created_at=0.0, last_heartbeat_at=0.0
    )


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("tx.db", "must be sqlite:///FILE"),
        ("", "must be sqlite:///FILE"),
        ("mysql://host/name", "got mysql://"),
        ("sqlite://", "in-memory"),
        ("sqlite:///:memory:", "in-memory"),
    ],
)
def test_unusable_databases_are_refused_with_remedy(url: str, says: str):
    with pytest.raises(ConfigError, match=says):
        Store(url)


@pytest.mark.parametrize("driver", ["postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg2"])
def test_any_driver_is_taken_as_ours(driver: str):
    assert parse_url(f"{driver}://host/name").drivername == "postgresql+psycopg"


async def refusal(url: str) -> str:
    store = Store(url, reconnect_seconds=0.5)
    with pytest.raises(ConfigError) as caught:
        await store.start()
    return str(caught.value)


async def test_foreign_database_files_are_refused(tmp_path: Path):
    (tmp_path / "tx.db").write_text("not a database " * 1000)
    with closing(sqlite3.connect(tmp_path / "tinker.db")) as connection:
        connection.execute("CREATE TABLE sessions (session_id TEXT)")
    assert "file is not a database" in await refusal(f"sqlite:///{tmp_path / 'tx.db'}")
    assert "cannot be used" in await refusal(f"sqlite:///{tmp_path / 'tx.db' / 'tx.db'}")  # no folder can be made there
    assert "tables of another program (sessions)" in await refusal(f"sqlite:///{tmp_path / 'tinker.db'}")


@pytest.mark.parametrize(("found", "says"), [(SCHEMA_VERSION + 1, "update skyrl-tx"), (0, "older release")])
async def test_another_schema_is_refused(tmp_path: Path, found: int, says: str):
    url = f"sqlite:///{tmp_path / 'tx.db'}"
    async with opened(url):
        pass
    with closing(sqlite3.connect(tmp_path / "tx.db")) as connection, connection:
        connection.execute("UPDATE schema SET version = ?", (found,))
    assert says in await refusal(url)


async def test_previous_database_version_is_migrated(url: str):
    async with opened(url) as store:
        await store.write(add("a"))
    database = Database(url)
    with database.writer.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE requests DROP COLUMN content")
        connection.exec_driver_sql("ALTER TABLE models DROP COLUMN share_experts")
        connection.exec_driver_sql("UPDATE schema SET version = 1")
    database.close()
    for _ in range(2):
        async with opened(url) as store:
            assert await store.read(names) == ["a"]
            for column in ("content FROM requests", "share_experts FROM models"):
                rows = await store.read(lambda session, column=column: session.execute(text(f"SELECT {column}")).all())
                assert rows == []


def test_table_change_requires_new_schema_version():
    """If this fails: raise SCHEMA_VERSION if the last version has users, and write the new fingerprint here."""
    from hashlib import sha256

    from sqlalchemy.dialects import sqlite

    tables = sorted(str(CreateTable(table).compile(dialect=sqlite.dialect())) for table in Row.metadata.tables.values())
    assert (SCHEMA_VERSION, sha256("".join(tables).encode()).hexdigest()[:8]) == (3, TABLES_OF_VERSION_3)


async def test_second_server_is_refused_until_first_exits(url: str):
    async with opened(url) as store:
        says = "in use by another server" + " (process " * url.startswith("sqlite")
        assert says in await refusal(url)
        await store.write(add("a"))
    async with opened(url) as store:
        assert await store.read(names) == ["a"]


async def test_database_password_is_not_shown(tmp_path: Path):
    text = await refusal("postgresql://user:secret@127.0.0.1:1/name")
    assert "secret" not in text and "127.0.0.1:1" in text


@pytest.mark.process
class TestPostgres:
    @pytest.fixture
    async def store(self, postgres_url: str) -> AsyncIterator[Store]:
        async with opened(postgres_url) as store:
            yield store

    async def test_missing_database_is_reported(self, postgres: Any):
        assert '"nowhere" does not exist' in await refusal(postgres.url("nowhere"))

    async def test_lost_connection_is_reopened_and_units_run_once(self, postgres: Any, postgres_url: str, store: Store):
        runs = []

        def cut_off(session: Session) -> None:
            runs.append(0)
            add("a")(session)
            if len(runs) == 1:
                postgres.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            add("b")(session)

        await asyncio.gather(store.write(add("before")), store.write(cut_off), store.write(add("after")))
        assert len(runs) == 2
        assert await store.read(names) == ["a", "after", "b", "before"]
        assert "in use by another server" in await refusal(postgres_url)  # the new connection holds the lock

    async def test_connection_lost_in_commit_leaves_outcome_open(self, postgres: Any, store: Store):
        def cut_off(_: Any) -> None:
            postgres.run("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

        event.listen(store._database.writer, "commit", cut_off, once=True)
        with pytest.raises(StoreError, match="may or may not be applied") as caught:
            await store.write(add("a"))
        assert caught.value.may_stand
        await store.write(add("b"))
        assert "b" in await store.read(names)

    @pytest.mark.slow
    async def test_restarting_database_server_is_awaited(self, postgres: Any, store: Store):
        await store.write(add("a"))
        await store.read(names)
        await asyncio.to_thread(postgres.stop)
        write, read = asyncio.create_task(store.write(add("b"))), asyncio.create_task(store.read(names))
        await asyncio.sleep(1)
        assert not write.done() and not read.done()
        await asyncio.to_thread(postgres.start)
        await write
        assert "a" in await read
        assert await store.read(names) == ["a", "b"]

    async def test_unreachable_database_server_is_error(self, postgres: Any, postgres_url: str):
        async with opened(postgres_url, reconnect_seconds=0.5) as store:
            await store.write(add("a"))
            await asyncio.to_thread(postgres.stop)
            try:
                started = time.monotonic()
                with pytest.raises(StoreError, match="was not applied"):
                    await store.write(add("b"))
                with pytest.raises(StoreError, match="cannot be reached"):
                    await store.read(names)
                assert time.monotonic() - started < 30
            finally:
                await asyncio.to_thread(postgres.start)
            await store.write(add("c"))
            assert await store.read(names) == ["a", "c"]
