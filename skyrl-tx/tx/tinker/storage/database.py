"""Connections to sqlite and PostgreSQL: URLs, setup, and the lock that allows only one writing server.

sqlite needs a local disk (its log is shared memory); a pooler for PostgreSQL must keep sessions (the lock belongs to a
session). Independent of tables, except for the schema version.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlmodel import Session

from tx.errors import ConfigError
from tx.tinker.storage.db_models import MIGRATIONS, SCHEMA_VERSION, Row, SchemaRow

_NUM_READERS = 4
_BUSY_SECONDS = 30
_ADVISORY_LOCK = 0x74785F74696E6B65  # "tx_tinke"
_LOCK_PATIENCE_SECONDS = 5.0
"""A server that was killed a moment ago may still hold the lock: PostgreSQL has to notice first."""
_WAY_OUT = (
    "Restore a copy, or move the file, its -wal and -shm and `blobs` of the state folder away and start with an "
    "empty state; then `tx recover` lists the checkpoints on disk again"
)
_SQLITE_PRAGMAS = {
    "journal_mode": "WAL",
    "busy_timeout": _BUSY_SECONDS * 1000,
    "foreign_keys": "ON",
    "synchronous": "FULL",
    "cache_size": -4_000,  # KiB, for each connection
    "journal_size_limit": 64 << 20,
    "temp_store": "MEMORY",
}


class AlreadyServed(ConfigError):
    """Another server has this database."""


def parse_url(text: str) -> URL:
    """Parse the URL of a database, with our drivers (other driver names, such as `+asyncpg`, are replaced).

    Raises:
        ConfigError: not a URL of sqlite or PostgreSQL.
    """
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigError(
            f"database_url must be sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME; got {text[:80]!r}"
        ) from error
    backend = url.get_backend_name()
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if backend != "sqlite":
        raise ConfigError(f"database_url must begin with sqlite:/// or postgresql://; got {backend}://…")
    if not url.database or url.database == ":memory:":
        raise ConfigError("database_url: an in-memory database is lost at every restart; use sqlite:///FILE")
    file = Path(url.database).expanduser().absolute()
    return url.set(drivername="sqlite+pysqlite", database=str(file))


class Database:
    """One connection to write, a few to read.

    Args:
        text: the URL

    Raises:
        ConfigError: it does not work, with the reason.
    """

    def __init__(self, text: str):
        self.url = parse_url(text)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._lock: int | None = None
        try:
            self.writer = self._create_engine(num_connections=1)
            self.reader = self._create_engine(num_connections=_NUM_READERS)
        except (ImportError, NoSuchModuleError) as error:
            raise ConfigError(
                "database_url: PostgreSQL needs a driver that is not installed; pip install 'skyrl-tx[postgres]'"
            ) from error
        self.num_readers = _NUM_READERS

    def __str__(self) -> str:
        return self.url.set(drivername=self.url.get_backend_name()).render_as_string(hide_password=True)

    def open(self) -> str:
        """Lock the database for this process, create missing tables and check their version.

        Returns:
            the database's id

        Raises:
            ConfigError: it cannot be reached or written, another server has it, or its tables are of another version.
        """
        try:
            if self.is_sqlite:
                self._lock_file()
                self._on_connect(self.writer, _set_up_sqlite)
                self._on_connect(self.reader, _set_up_sqlite_reader)
                self._check_file()
            else:
                self._on_connect(self.writer, _acquire_advisory_lock)
            return self._check_schema()
        except (SQLAlchemyError, OSError) as error:
            raise _build_error(self, error) from error

    @contextmanager
    def reading(self) -> Iterator[tuple[Session, int]]:
        """Yield a session of a database that no server uses, and its schema's version, 0 where there are no tables yet.
        Nothing is created or migrated.

        Raises:
            ConfigError: the database does not exist, is in use by a server, damaged, or from an unreadable release.
        """
        engine = _read_only_engine(self.url)
        try:
            if self.is_sqlite:
                self._lock_to_read()
            else:
                event.listen(engine, "connect", lambda connection, _: _acquire_advisory_lock(connection))
            with Session(engine, expire_on_commit=False) as session:
                if self.is_sqlite:
                    _run_quick_check(self, session.connection())
                yield session, self._check_readable_version(session)
        except (SQLAlchemyError, OSError) as error:
            raise _build_error(self, error) from error
        finally:
            engine.dispose()
            self.close()

    def _check_file(self) -> None:
        """Raise ConfigError if the file is damaged: better at the start than in the middle of a run."""
        with self.writer.connect() as connection:
            _run_quick_check(self, connection)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Yield the writing connection. After an error it is discarded: a failed commit may leave a transaction
        open.
        """
        with self.writer.connect() as connection:
            try:
                yield connection
            except BaseException:
                connection.invalidate()
                raise

    def close(self) -> None:
        self.reader.dispose()
        self.writer.dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _create_engine(self, num_connections: int) -> Engine:
        arguments: dict[str, Any] = {"check_same_thread": False, "timeout": _BUSY_SECONDS}
        if not self.is_sqlite:
            # Keepalives detect an unreachable host within a minute instead of two hours.
            arguments = {"connect_timeout": 10, "keepalives_idle": 20, "keepalives_interval": 10, "keepalives_count": 4}
            arguments["application_name"] = "skyrl-tx"
        engine = create_engine(
            self.url, connect_args=arguments, pool_size=num_connections, max_overflow=0, pool_timeout=_BUSY_SECONDS
        )
        _make_savepoints_cheap(engine)
        if not self.is_sqlite and num_connections > 1:
            engine = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        return engine

    def _on_connect(self, engine: Engine, set_up: Callable[[Any], None]) -> None:
        event.listen(engine, "connect", lambda connection, _: set_up(connection))
        if self.is_sqlite:
            # The driver begins transactions late and only for some statements; we begin them.
            begin = "BEGIN IMMEDIATE" if engine is self.writer else "BEGIN"
            event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))

    def _lock_to_read(self) -> None:
        """Lock the file against servers. A missing lock file is not created: then no server uses the database."""
        if not (database := Path(str(self.url.database))).is_file():
            raise ConfigError(f"database_url: no file {database}; check --state-dir")
        with suppress(FileNotFoundError):
            self._lock_as(os.O_RDONLY)

    def _lock_file(self) -> None:
        """Lock the file for one server. The lock is released when the process exits for any reason; the file
        remains.
        """
        Path(str(self.url.database)).parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._lock_as(os.O_RDWR | os.O_CREAT)
        # Written only with the lock held, so that the id in a refusal is never that of a server that was refused.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _lock_as(self, flags: int) -> int:
        database = Path(str(self.url.database))
        descriptor = os.open(database.with_name(database.name + ".lock"), flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 100).decode(errors="replace").strip()
            os.close(descriptor)
            raise AlreadyServed(
                f"database_url: {self} is in use by another server (process {owner or 'unknown'}); stop it, or use "
                "another --database-url and --state-dir"
            ) from error
        self._lock = descriptor
        return descriptor

    def _check_schema(self) -> str:
        with self.writer.connect() as connection:
            self._has_tables(connection)
        Row.metadata.create_all(self.writer)
        with Session(self.writer, expire_on_commit=False) as session:
            schema = session.scalars(select(SchemaRow)).first()
            if schema is None:
                schema = SchemaRow(version=SCHEMA_VERSION, database_id=secrets.token_hex(8), created_at=time.time())
                session.add(schema)
            while schema.version in MIGRATIONS:  # in one transaction with the version
                session.connection().exec_driver_sql(MIGRATIONS[schema.version][self.url.get_backend_name()])
                schema.version += 1
            session.commit()
        self._check_version(schema.version, (SCHEMA_VERSION,))
        return schema.database_id

    def _has_tables(self, connection: Connection) -> bool:
        """Return True if our tables exist.

        Raises:
            ConfigError: the tables belong to another program.
        """
        found = set(inspect(connection).get_table_names()) & set(Row.metadata.tables)
        if found and SchemaRow.__tablename__ not in found:
            raise ConfigError(
                f"database_url: {self} has tables of another program ({', '.join(sorted(found))}); use an empty or "
                "new database"
            )
        return bool(found)

    def _check_readable_version(self, session: Session) -> int:
        if not self._has_tables(session.connection()):
            return 0
        version = session.scalars(select(SchemaRow)).one().version
        self._check_version(version, (*MIGRATIONS, SCHEMA_VERSION))
        return version

    def _check_version(self, version: int, good: tuple[int, ...]) -> None:
        if version in good:
            return
        newer = version > SCHEMA_VERSION
        way_out = "update skyrl-tx" if newer else "start the release of skyrl-tx that created it"
        raise ConfigError(
            f"database_url: {self} was created by {'a newer' if newer else 'an older'} release (schema {version}, "
            f"this one has {SCHEMA_VERSION}); {way_out}, or use a new database"
        )


def _read_only_engine(url: URL) -> Engine:
    if url.get_backend_name() != "sqlite":
        engine = create_engine(url, connect_args={"connect_timeout": 10, "application_name": "skyrl-tx"})
        return engine.execution_options(postgresql_readonly=True)
    # A log that a killed server left must be read too, for which sqlite needs the shared memory beside it; without one
    # the file is all there is, and `immutable` keeps sqlite from making either.
    file = Path(str(url.database))
    log = file.with_name(file.name + "-wal")
    query = {"mode": "ro", "uri": "true"} | ({} if log.exists() else {"immutable": "1"})
    return create_engine(url.set(database=f"file:{quote(str(file))}", query=query))


def _run_quick_check(database: "Database", connection: Connection) -> None:
    found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise ConfigError(f"database_url: {database} is damaged ({found}). {_WAY_OUT}")


def _build_error(database: "Database", error: Exception) -> ConfigError:
    way_out = f". {_WAY_OUT}" if "not a database" in str(error) or "malformed" in str(error) else ""
    return ConfigError(f"database_url: {database} cannot be used: {extract_reason(error)}{way_out}")


def _make_savepoints_cheap(engine: Engine) -> None:
    """Cache the three savepoint statements: SQLAlchemy compiles them at each use, a third of the time of a small
    unit.
    """
    for method, statement in (
        ("do_savepoint", "SAVEPOINT"),
        ("do_release_savepoint", "RELEASE SAVEPOINT"),
        ("do_rollback_to_savepoint", "ROLLBACK TO SAVEPOINT"),
    ):

        def run(connection: Connection, name: str, statement: str = statement) -> None:
            connection.exec_driver_sql(f"{statement} {name}")

        setattr(engine.dialect, method, run)


def _set_up_sqlite(connection: Any) -> None:
    connection.isolation_level = None
    for pragma, value in _SQLITE_PRAGMAS.items():
        connection.execute(f"PRAGMA {pragma}={value}").close()


def _set_up_sqlite_reader(connection: Any) -> None:
    _set_up_sqlite(connection)
    connection.execute("PRAGMA query_only=ON").close()


def _acquire_advisory_lock(connection: Any) -> None:
    """PostgreSQL's lock is the writing connection's: while we can write, it is ours; when the connection is lost, so is
    the lock, and the next connection takes it again before it writes."""
    deadline = time.monotonic() + _LOCK_PATIENCE_SECONDS
    while True:
        if connection.execute("SELECT pg_try_advisory_lock(%s)", (_ADVISORY_LOCK,)).fetchone()[0]:
            connection.commit()
            return
        connection.rollback()
        if time.monotonic() > deadline:
            with suppress(Exception):
                connection.close()
            raise AlreadyServed(
                "database_url: this PostgreSQL database is in use by another server; stop it, or use another "
                "--database-url"
            )
        time.sleep(0.1)


def extract_reason(error: Exception) -> str:
    """Return the driver's message, without SQLAlchemy's wrapping."""
    return str(error.orig if isinstance(error, DBAPIError) else error).strip()
