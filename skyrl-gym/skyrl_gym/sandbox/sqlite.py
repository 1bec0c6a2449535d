"""Sandbox for untrusted SQL: one query on one SQLite file, which it can read and nothing else.

Nothing here knows models, observations or rewards. What stands between a query and the world, each layer enough alone:
the file is opened read-only, an authorizer refuses every statement but SELECT, no further database can be attached, and
time, memory and temporary files are bounded.
"""

import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from skyrl_gym.error import InfraError

MEBIBYTE = 1 << 20

Row = tuple[int | float | str | bytes | None, ...]
"""Values of a row: None, int, float, str, bytes."""


class QueryError(Exception):
    """The query is invalid or not permitted. The text is for the author of the query."""


class QueryTimeout(QueryError):
    """The query took longer than it may."""


@dataclass(frozen=True, kw_only=True)
class QueryLimits:
    """Resource limits of one query."""

    wall_seconds: float = 30.0
    value_bytes: int = MEBIBYTE
    """Size of one text, blob or row. Also bounds the cost of a single function call, which cannot be interrupted."""
    result_bytes: int = 256 * MEBIBYTE
    """Total size of texts and blobs in the result."""
    temporary_bytes: int = 512 * MEBIBYTE
    """Size of temporary files, for sorting and grouping. Enforced where the kernel counts it (Linux)."""


DEFAULT_LIMITS = QueryLimits()

ONLY_SELECT = "only SELECT may be run here: no PRAGMA, no ATTACH, nothing that writes"

MAX_SQL_LENGTH = 100_000
MAX_TABLE_EXPRESSIONS = 100
MAX_EXPANSIONS = 4096
"""Maximum number of expansions of common table expressions into each other; see `_count_expansions`."""

_ALLOWED_ACTIONS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}

_SERVICE_FAILURES = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_FULL,
}
"""Result codes that say something about the file or the disk, and nothing about the query."""

_WATCH_INTERVAL = 0.05  # seconds


def read_rows(db_file: str, sql: str, limits: QueryLimits = DEFAULT_LIMITS) -> Generator[Row, None, None]:
    """Yield the rows of one query, as they come: the caller stops when it has enough, and should close the generator.

    Text that is not UTF-8 has its stray bytes spelled out (`\\xe9`), so that different bytes stay different.

    Raises:
        QueryError: the query is wrong, forbidden or too expensive; `QueryTimeout` if its time is up.
        InfraError: the database cannot be opened or read.
    """
    if len(sql) > MAX_SQL_LENGTH:
        raise QueryError(f"the query is longer than {MAX_SQL_LENGTH} characters")
    if _count_expansions(sql) > MAX_EXPANSIONS:
        raise QueryError("the common table expressions use each other too many times")
    try:
        connection = sqlite3.connect(_make_uri(db_file), uri=True, isolation_level=None, timeout=limits.wall_seconds)
    except sqlite3.Error as failure:
        raise InfraError(f"cannot open the database {db_file}: {failure}") from failure
    watch = _Watch(connection, limits)
    try:
        _restrict(connection, limits)
        with watch:
            yield from _fetch(connection, sql, limits)
    except (sqlite3.Error, sqlite3.Warning) as failure:
        raise _convert_error(failure, watch, db_file) from failure
    except (ValueError, OverflowError, MemoryError) as failure:  # a null character, a lone surrogate, no memory
        raise QueryError(str(failure) or "out of memory") from failure
    finally:
        connection.close()


def _make_uri(db_file: str) -> str:
    """Read-only, and without locks or side files unless a writer left some: then they belong to the content."""
    path = Path(db_file).absolute()
    in_use = any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal"))
    return f"{path.as_uri()}?mode=ro{'' if in_use else '&immutable=1'}"


def _restrict(connection: sqlite3.Connection, limits: QueryLimits) -> None:
    # Decoding must not raise in the middle of a result: stray bytes are spelled out.
    connection.text_factory = lambda data: data.decode("utf-8", "backslashreplace")
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, limits.value_bytes),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * MAX_SQL_LENGTH),
        (sqlite3.SQLITE_LIMIT_COLUMN, 1000),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 100),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 500),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1000),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),  # also what VACUUM INTO would need
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)


def _authorize(action: int, first: str | None, second: str | None, database: str | None, inside: str | None) -> int:
    if action not in _ALLOWED_ACTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _fetch(connection: sqlite3.Connection, sql: str, limits: QueryLimits) -> Generator[Row, None, None]:
    cursor = connection.cursor()
    cursor.execute(sql)
    if cursor.description is None:
        raise QueryError(f"the statement has no result; {ONLY_SELECT}")
    num_bytes = 0
    for row in cursor:
        num_bytes += sum(len(value) for value in row if isinstance(value, str | bytes))
        if num_bytes > limits.result_bytes:
            raise QueryError(f"the result is larger than {limits.result_bytes // MEBIBYTE} MiB")
        yield row


def _convert_error(failure: Exception, watch: "_Watch", db_file: str) -> Exception:
    """Classify an error of SQLite as the query's, the database's or a limit's."""
    code = getattr(failure, "sqlite_errorcode", 0) & 0xFF  # the upper bits only refine
    if code == sqlite3.SQLITE_INTERRUPT and watch.stopped_for is not None:
        return watch.stopped_for
    if code in _SERVICE_FAILURES:
        return InfraError(f"cannot read the database {db_file}: {failure}")
    if code == sqlite3.SQLITE_AUTH:
        return QueryError(f"{failure}: {ONLY_SELECT}")
    return QueryError(str(failure))


class _Watch:
    """Watchdog of a query that takes too long or fills the disk.

    A thread, not a progress handler: that would need the interpreter lock every few thousand instructions, and so crawl
    in a busy process. It interrupts again and again, because SQLite forgets an interrupt that comes between two steps.
    """

    def __init__(self, connection: sqlite3.Connection, limits: QueryLimits):
        self.stopped_for: QueryError | None = None
        self._connection = connection
        self._limits = limits
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sqlite-watch", daemon=True)

    def __enter__(self) -> None:
        self._deadline = time.monotonic() + self._limits.wall_seconds
        # Of this thread alone, which runs the query: temporary files of others are not its fault.
        self._counters = f"/proc/self/task/{threading.get_native_id()}/io"
        self._written_before = self._written()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()  # it must not interrupt a connection that is closed

    def _run(self) -> None:
        while not self._finished.wait(min(_WATCH_INTERVAL, max(0.001, self._deadline - time.monotonic()))):
            if time.monotonic() >= self._deadline:
                self.stopped_for = QueryTimeout(f"the query took longer than {self._limits.wall_seconds:g} seconds")
            elif self._written() - self._written_before > self._limits.temporary_bytes:
                self.stopped_for = QueryError("the query needs too much space for temporary results")
            if self.stopped_for is not None:
                self._connection.interrupt()

    def _written(self) -> int:
        """Bytes that the thread of the query has written: it reads a read-only file, so these are temporary files."""
        try:
            with open(self._counters, encoding="ascii") as counters:
                return next(int(line.split()[1]) for line in counters if line.startswith("wchar:"))
        except OSError:
            return 0


_COMMENT = re.compile(r"--[^\n]*|/\*.*?\*/", re.DOTALL)
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]""")
_DEFINITION = re.compile(r"\b(\w+)\b\s*(?:\([^()]*\)\s*)?\bas\s*(?:(?:not\s+)?materialized\s*)?\(")


def _count_expansions(sql: str) -> int:
    """Bound the number of copies that SQLite makes of one common table expression's body.

    `WITH a AS (...), b AS (... a, a), c AS (... b, b), ...` doubles with every line, and the copying cannot be
    interrupted. Estimated from the text alone; too high where a column is named like a table.
    """
    text = _QUOTED.sub(
        lambda quoted: f" {re.sub('[^0-9A-Za-z]', '_', quoted[0][1:-1])} ", _COMMENT.sub(" ", sql)
    ).lower()
    definitions = list(_DEFINITION.finditer(text))
    if not definitions:
        return 0
    if len(definitions) > MAX_TABLE_EXPRESSIONS:
        return MAX_EXPANSIONS + 1
    names = {definition[1] for definition in definitions}
    uses: dict[str, Counter[str]] = {name: Counter() for name in names}
    ends = [definition.start() for definition in definitions[1:]] + [len(text)]
    for definition, end in zip(definitions, ends, strict=True):
        uses[definition[1]].update(word for word in re.findall(r"\w+", text[definition.end() : end]) if word in names)
    copies = dict.fromkeys(names, 1)
    for _ in names:  # at worst one more name is counted right with each round
        before = dict(copies)
        for name, used in uses.items():
            total = 1 + sum(times * copies[other] for other, times in used.items() if other != name)
            copies[name] = min(total, MAX_EXPANSIONS + 1)
        if copies == before:
            break
    return max(copies.values())
