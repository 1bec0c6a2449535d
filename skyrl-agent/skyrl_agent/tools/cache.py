"""Web pages that were read before, for all trajectories of a process, and of several if it is a file."""

import logging
import sqlite3
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_SCHEMA = "CREATE TABLE IF NOT EXISTS pages (url TEXT PRIMARY KEY, text TEXT NOT NULL, used REAL NOT NULL)"
_LOCK_SECONDS = 2.0


class WebPageCache:
    """LRU cache of `max_size` pages. A cache that fails is one that finds nothing.

    From any number of threads and processes.

    Args:
        cache_file: an SQLite file, made with its folder if it is not there; none: in memory.
    """

    def __init__(self, max_size: int = 10_000, cache_file: str | Path | None = None) -> None:
        self.max_size = max_size
        if cache_file is not None:
            Path(cache_file).expanduser().parent.mkdir(parents=True, exist_ok=True)
        path = ":memory:" if cache_file is None else str(Path(cache_file).expanduser())
        self._lock = threading.Lock()
        # One connection for all threads, which therefore share a lock. Each statement commits by itself: a transaction
        # left open would block other processes.
        self._database = sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None, check_same_thread=False)
        self._run("PRAGMA journal_mode=WAL")
        self._run(_SCHEMA)

    def get(self, url: str) -> str | None:
        # One statement reads and marks as used: no other process can delete the page in between.
        found = self._run("UPDATE pages SET used = ? WHERE url = ? RETURNING text", time.time(), url)
        return found[0][0] if found else None

    def put(self, url: str, text: str) -> None:
        text = text.encode(errors="replace").decode()  # SQLite rejects lone surrogates
        self._run("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", url, text, time.time())
        self._run(
            "DELETE FROM pages WHERE url IN (SELECT url FROM pages ORDER BY used DESC LIMIT -1 OFFSET ?)", self.max_size
        )

    def __len__(self) -> int:
        found = self._run("SELECT count(*) FROM pages")
        return found[0][0] if found else 0

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _run(self, statement: str, *values: object) -> list[tuple]:
        try:
            with self._lock:
                return self._database.execute(statement, values).fetchall()
        except (sqlite3.Error, UnicodeError) as failure:
            logger.warning("the cache of web pages failed: %s", failure)
            return []


_shared: dict[str | None, WebPageCache] = {}
_sharing = threading.Lock()


def get_shared_cache(cache_file: str | None, max_size: int) -> WebPageCache:
    """Return this process's cache for that file."""
    with _sharing:
        if cache_file not in _shared:
            _shared[cache_file] = WebPageCache(max_size, cache_file)
        return _shared[cache_file]
