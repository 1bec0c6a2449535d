"""Four questions to a small bookshop: what the `text2sql` environment is tried on."""

import atexit
import functools
import os
import shutil
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

from skyrl_gym.envs.base_text_env import Example

SCHEMA = """\
CREATE TABLE author (id INTEGER PRIMARY KEY, name TEXT, country TEXT);
CREATE TABLE book (id INTEGER PRIMARY KEY, title TEXT, author_id INTEGER, year INTEGER, price REAL);
CREATE TABLE sale (book_id INTEGER, month TEXT, copies INTEGER);"""

AUTHORS = [(1, "Ada Ferro", "Italy"), (2, "Bo Lind", "Sweden"), (3, "Cem Kaya", "Turkey"), (4, "Dora Pohl", "Austria")]
BOOKS = [
    (1, "Salt Roads", 1, 1998, 12.5),
    (2, "The Ferryman's Ledger", 1, 2007, 18.0),
    (3, "Northern Bees", 2, 2011, 9.9),
    (4, "Snow Arithmetic", 2, 2019, 21.0),
    (5, "Courtyards", 3, 2003, 14.0),
]
SALES = [
    (1, "2024-01", 31),
    (1, "2024-02", 12),
    (2, "2024-01", 7),
    (3, "2024-02", 55),
    (4, "2024-02", 19),
    (5, "2024-01", 23),
]

QUESTIONS = [
    ("Which books were published before 2005?", "SELECT title FROM book WHERE year < 2005"),
    (
        "How many copies did each author sell? Give name and copies of those who sold any.",
        "SELECT a.name, SUM(s.copies) FROM author a JOIN book b ON b.author_id = a.id "
        "JOIN sale s ON s.book_id = b.id GROUP BY a.id",
    ),
    (
        "Which authors have no book in the shop?",
        "SELECT name FROM author WHERE id NOT IN (SELECT author_id FROM book)",
    ),
    (
        "What did the shop take in each month? Give month and total price.",
        "SELECT s.month, SUM(s.copies * b.price) FROM sale s JOIN book b ON b.id = s.book_id GROUP BY s.month",
    ),
]

INSTRUCTIONS = """\
Answer the question with one SQLite query. Think inside <think> and </think> before every step. You may try queries: \
write <sql>query</sql> and its rows come back inside <observation> and </observation>. When you are sure, give the \
final query as <solution>query</solution>."""

_lock = threading.Lock()


def make_examples() -> list[Example]:
    """Return the questions, and answers that look at the data first where that is natural."""
    db_path = str(bookshop())
    return [_make_example(db_path, question, query) for question, query in QUESTIONS]


def _make_example(db_path: str, question: str, query: str) -> Example:
    return Example(
        prompt=[{"role": "user", "content": f"{INSTRUCTIONS}\n\nDatabase:\n{SCHEMA}\n\nQuestion: {question}"}],
        extras={"db_id": "bookshop", "data": "spider", "reward_spec": {"method": "rule", "ground_truth": query}},
        oracle=[
            f"<think>I try it first.</think>\n<sql>{query}</sql>",
            f"<think>These are the rows that were asked for.</think>\n<solution>{query}</solution>",
        ],
        env_config={"db_path": db_path},
    )


def bookshop() -> Path:
    """Return a folder as `db_path` wants it, made once in a process and deleted when that ends."""
    # Held while the files are written: a second thread would find a folder without tables.
    with _lock:
        return _make_bookshop(os.getpid())


@functools.cache
def _make_bookshop(process: int) -> Path:
    root = Path(tempfile.mkdtemp(prefix="bookshop-"))
    # The id of the process is part of the cache key: a forked child makes a folder of its own.
    atexit.register(_remove, root, process)
    folder = root / "spider" / "database" / "bookshop"
    folder.mkdir(parents=True)
    # `closing` closes the connection, the connection as a context commits.
    with closing(sqlite3.connect(folder / "bookshop.sqlite")) as connection, connection:
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO author VALUES (?, ?, ?)", AUTHORS)
        connection.executemany("INSERT INTO book VALUES (?, ?, ?, ?, ?)", BOOKS)
        connection.executemany("INSERT INTO sale VALUES (?, ?, ?)", SALES)
    return root


def _remove(root: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves its parent's folder alone
        shutil.rmtree(root, ignore_errors=True)
