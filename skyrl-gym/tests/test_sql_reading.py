import os
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.sqlite import QueryError, QueryLimits, QueryTimeout, read_rows

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "


@pytest.fixture
def db(tmp_path) -> str:
    file = tmp_path / "data" / "zoo #1?%20.sqlite"  # a name that means something in a URI
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.executescript(
            "CREATE TABLE animal (name TEXT, legs INTEGER); CREATE VIEW big AS SELECT * FROM animal WHERE legs > 2;"
            "INSERT INTO animal VALUES ('cat', 4), ('hen', 2), ('eel', 0), (CAST(X'E96C' AS TEXT), NULL);"
        )
    return str(file)


def rows(db: str, sql: str, **limits) -> list:
    return list(read_rows(db, sql, QueryLimits(**limits)))


def test_rows_come_as_they_are(db):
    assert rows(db, "SELECT * FROM animal WHERE legs >= 2 ORDER BY legs") == [("hen", 2), ("cat", 4)]
    assert rows(db, "SELECT NULL, 1.5, X'00ff' -- and that is all\n;") == [(None, 1.5, b"\x00\xff")]
    assert rows(db, "SELECT name FROM big WHERE 0") == []
    assert rows(db, "EXPLAIN QUERY PLAN SELECT * FROM animal") != []
    assert rows(db, "WITH legs(n) AS (SELECT DISTINCT legs FROM animal) SELECT COUNT(n) FROM legs") == [(3,)]
    assert rows(db, "SELECT name FROM animal WHERE legs IS NULL") == [("\\xe9l",)]  # the bytes of no UTF-8


FORBIDDEN = [
    "INSERT INTO animal VALUES ('dog', 4)",
    "UPDATE animal SET legs = 3",
    "DELETE FROM animal",
    "REPLACE INTO animal VALUES ('dog', 4)",
    "DROP TABLE animal",
    "ALTER TABLE animal ADD COLUMN age",
    "CREATE TABLE other (x)",
    "CREATE TEMP TABLE other (x)",
    "CREATE TEMP VIEW other AS SELECT 1",
    "CREATE TRIGGER t AFTER INSERT ON animal BEGIN SELECT 1; END",
    "CREATE INDEX i ON animal(name)",
    "CREATE VIRTUAL TABLE f USING fts5(x)",
    "WITH a AS (SELECT 1) DELETE FROM animal",
    "ATTACH 'FILE' AS other",
    "ATTACH 'file:FILE?mode=rwc' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO 'FILE'",
    "REINDEX",
    "ANALYZE",
    "BEGIN",
    "BEGIN EXCLUSIVE",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT s",
    "PRAGMA journal_mode = WAL",
    "PRAGMA journal_mode = DELETE",
    "PRAGMA writable_schema = ON",
    "PRAGMA query_only = OFF",
    "PRAGMA user_version = 7",
    "PRAGMA temp_store_directory = 'FILE'",
    "PRAGMA hard_heap_limit = 1",
    "PRAGMA table_info(animal)",
    "SELECT * FROM pragma_table_info('animal')",
    "SELECT load_extension('FILE')",
    "SELECT fts3_tokenizer('simple')",
    "SELECT fts3_tokenizer('simple', X'0000000000000000')",
    "SELECT writefile('FILE', 'x')",
    "SELECT readfile('/etc/hostname')",
    "SELECT 1; DELETE FROM animal",
    "",
    "-- nothing",
]


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_nothing_but_reading_is_possible_and_nothing_is_touched(db, tmp_path, sql):
    file = Path(db)
    before = (file.read_bytes(), file.stat().st_mtime_ns, sorted(os.listdir(file.parent)))
    with pytest.raises(QueryError):
        rows(db, sql.replace("FILE", str(tmp_path / "new.db")))
    assert (file.read_bytes(), file.stat().st_mtime_ns, sorted(os.listdir(file.parent))) == before
    assert os.listdir(tmp_path) == ["data"]


def test_file_is_read_only_without_authorizer(db, monkeypatch):
    monkeypatch.setattr("skyrl_gym.sandbox.sqlite._authorize", lambda *_: sqlite3.SQLITE_OK)
    before = Path(db).read_bytes()
    for sql in ("DELETE FROM animal", "ATTACH ':memory:' AS other", "VACUUM INTO 'x.db'", "PRAGMA user_version = 7"):
        with pytest.raises((QueryError, InfraError)):
            rows(db, sql)
    assert Path(db).read_bytes() == before and not Path("x.db").exists()


@pytest.mark.parametrize(
    "sql, text",
    [
        ("SELEC 1", 'near "SELEC": syntax error'),
        ("PRAGMA table_info(animal)", "only SELECT may be run here"),
        ("SELECT * FROM plants", "no such table: plants"),
        ("SELECT '\0'", "null character"),
        ("SELECT '\ud800'", "surrogates not allowed"),
        ("SELECT " + "1," * 60_000 + "1", "longer than 100000 characters"),
        ("SELECT " + "(" * 2000 + "1" + ")" * 2000, "parser stack overflow|Expression tree is too large"),
        ("SELECT " + ",".join("1" * 1001), "too many columns"),
        (" UNION ALL ".join(["SELECT 1"] * 200), "too many terms in compound SELECT"),
        ("SELECT zeroblob(100000000)", "string or blob too big"),
        ("SELECT name LIKE '" + "%a" * 1000 + "' FROM animal", "LIKE or GLOB pattern too complex"),
        (ENDLESS + "SELECT zeroblob(1000000) FROM n", "the result is larger than 8 MiB"),
    ],
)
def test_invalid_or_excessive_query_is_explained(db, sql, text):
    with pytest.raises(QueryError, match=text):
        rows(db, sql, result_bytes=8 << 20)


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS + "SELECT COUNT(*) FROM n",
        ENDLESS + "SELECT * FROM n WHERE x < 0",
        ENDLESS + "SELECT group_concat(x) FROM n",
        "SELECT COUNT(*) FROM " + ", ".join(f"animal a{n}" for n in range(30)),
    ],
)
def test_endless_query_is_stopped(db, sql):
    started = time.monotonic()
    with pytest.raises(QueryTimeout, match=r"0\.3 seconds"):
        rows(db, sql, wall_seconds=0.3)
    assert time.monotonic() - started < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "sqlite-watch"]


def test_disk_filling_query_is_stopped(db):
    with pytest.raises(QueryError, match="too much space for temporary results"):
        rows(db, ENDLESS + "SELECT x, zeroblob(100000) FROM n ORDER BY random()", temporary_bytes=20_000_000)


def test_exponential_common_table_expressions_are_rejected(db):
    lines = [f"t{n} AS (SELECT COUNT(*) FROM t{n - 1} a, t{n - 1} b)" for n in range(1, 40)]
    with pytest.raises(QueryError, match="use each other too many times"):
        rows(db, f"WITH t0 AS (SELECT 1), {', '.join(lines)} SELECT * FROM t39")
    quoted = [
        f'"t {n}" AS (SELECT COUNT(*) FROM "t {n - 1}" a, [t {n - 1}] /* and */, `t {n - 1}`)' for n in range(1, 40)
    ]
    with pytest.raises(QueryError, match="use each other too many times"):
        rows(db, f"WITH 't 0' AS NOT MATERIALIZED (SELECT 1), {', '.join(quoted)} SELECT * FROM 't 39'")
    chain = [f"t{n}(x) AS (SELECT x + 1 FROM t{n - 1})" for n in range(1, 60)]
    assert rows(db, f"WITH t0(x) AS (SELECT 1), {', '.join(chain)} SELECT * FROM t59") == [(60,)]


def test_large_cross_join_is_read_lazily(db):
    tables = ", ".join(f"animal a{n}" for n in range(20))
    with closing(read_rows(db, f"SELECT * FROM {tables}")) as found:
        assert len(list(islice(found, 1000))) == 1000


def test_unreadable_database_raises_infra_error(tmp_path, db):
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_bytes(b"not a database" * 1000)
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(Path(db).read_bytes()[:4096])  # of two pages
    for file in (garbage, broken, tmp_path / "missing.sqlite", tmp_path):
        with pytest.raises(InfraError, match=r"database"):
            rows(str(file), "SELECT * FROM animal")
    assert not (tmp_path / "missing.sqlite").exists()


def test_wal_database_read_sees_pending_writes_and_leaves_no_files(tmp_path):
    file = tmp_path / "wal.sqlite"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (x); INSERT INTO t VALUES (1)")
        assert rows(str(file), "SELECT * FROM t") == [(1,)]
    assert rows(str(file), "SELECT * FROM t") == [(1,)]
    assert os.listdir(tmp_path) == ["wal.sqlite"]


def test_threads_read_same_file(db):
    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(lambda _: rows(db, "SELECT COUNT(*) FROM animal"), range(200)))
    assert counts == [[(4,)]] * 200


def test_abandoned_reader_closes_file(db):
    reader = read_rows(db, "SELECT * FROM animal")
    next(reader)
    reader.close()
    open_files = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    assert db not in open_files
