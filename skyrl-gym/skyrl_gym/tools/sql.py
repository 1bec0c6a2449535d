"""SQL on the SQLite databases of a folder, read-only."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from skyrl_gym.sandbox.sqlite import MEBIBYTE, QueryError, QueryLimits, QueryTimeout, Row, read_rows
from skyrl_gym.tools.core import ToolGroup, tool
from skyrl_gym.tools.frame import Frame

MAX_CHARACTERS = 9000
MAX_LINES = 50
MAX_ROWS = 10_000
"""Rows fetched at most; a model sees `MAX_LINES` of that many."""

LIMITS = QueryLimits(wall_seconds=5.0, result_bytes=32 * MEBIBYTE, temporary_bytes=256 * MEBIBYTE)

INVALID_ACTION = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, and try again."
)


def database_file(folder: str, db_id: str) -> str:
    """`<folder>/<db_id>/<db_id>.sqlite`. Raises ValueError if `db_id` is not a plain name."""
    if not isinstance(db_id, str) or Path(db_id).name != db_id:
        raise ValueError(f"db_id must be the name of a database's folder; got {db_id!r:.100}")
    return str(Path(folder) / db_id / f"{db_id}.sqlite")


class SQLCodeExecutorToolGroup(ToolGroup):
    """One tool, `sql`, for the databases `<db_file_path>/<db_id>/<db_id>.sqlite`."""

    def __init__(self, db_file_path: str):
        self.db_file_path = db_file_path
        super().__init__(name="SQLCodeExecutorToolGroup")

    @tool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
        """Runs one SELECT query and shows its rows.

        Args:
            db_id: The database.
            sql: The query; None if the model wrote none.
            turns_left: Told to the model.
            timeout: Seconds.

        Raises:
            InfraError: the database cannot be read.
        """
        body = INVALID_ACTION if sql is None else self._answer(db_id, sql, timeout)
        reminder = f"<reminder>You have {turns_left} turns left to complete the task.</reminder>"
        return f"\n\n<observation>{body}\n{reminder}</observation>\n\n"

    def _answer(self, db_id: str, sql: str, timeout: float) -> str:
        db_file = database_file(self.db_file_path, db_id)
        try:
            return _to_frame(_remove_duplicate_rows(db_file, sql, replace(LIMITS, wall_seconds=timeout)))
        except QueryTimeout:
            return f"SQL Timeout:\n{sql}"
        except QueryError as failure:
            return f"Error executing SQL: {failure}, db file: {db_file}"


def _remove_duplicate_rows(db_file: str, sql: str, limits: QueryLimits) -> list[Row]:
    """Each row once, in the query's order."""
    rows: dict[Row, None] = {}
    with closing(read_rows(db_file, sql, limits)) as results:
        for row in results:
            rows[row] = None
            if len(rows) == MAX_ROWS:
                break
    return list(rows)


def _to_frame(rows: list[Row]) -> str:
    frame = Frame(rows, cell_characters=MAX_CHARACTERS)
    if len(frame) <= MAX_CHARACTERS:
        return frame.render()
    shown = Frame(rows[:MAX_LINES], cell_characters=MAX_CHARACTERS)
    return f"The result is long and truncated to {MAX_LINES} lines:\n{shown.render(MAX_CHARACTERS)}"
