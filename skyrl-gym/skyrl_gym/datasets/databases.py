"""Rows of questions to databases for `text2sql`, as Spider, BIRD and SynSQL are published."""

import functools
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from string import Template

from skyrl_gym.datasets.problems import Problem, Row, first
from skyrl_gym.envs.sql.env import DATABASE_FOLDERS
from skyrl_gym.envs.sql.examples import INSTRUCTIONS
from skyrl_gym.error import TaskError
from skyrl_gym.sandbox.sqlite import QueryError, QueryLimits, read_rows

SQL = "query|SQL|sql"
KNOWLEDGE = ("evidence", "external_knowledge")
GOLD_SECONDS = 10.0
"""A gold query that takes longer counts as one that does not run."""

OURS = Template(f"{INSTRUCTIONS}\n\nDatabase:\n$schema\n\n${{knowledge}}Question: $question")


@dataclass(frozen=True)
class DatabaseRowSettings:
    """Settings for the rows of one data set.

    Attributes:
        data: the databases' family, a key of `DATABASE_FOLDERS`.
        data_source: name of the set in tables.
        question: columns "a|b" with the question.
        keep_empty: keep questions whose query gives no rows.
        template: prompt with the placeholders `schema`, `knowledge` and `question`.
    """

    data: str
    data_source: str
    db_path: Path
    question: str = "question"
    keep_empty: bool = False
    template: Template = OURS


def text2sql_row(problem: Problem, split: str, index: int, settings: DatabaseRowSettings) -> Row | None:
    """Make a row from `db_id`, question, and `query`, `SQL` or `sql`. A prepared row (with messages in `prompt`) is
    kept.

    Returns None if the query fails, or returns no rows unless `keep_empty`.
    """
    if isinstance(problem.get("prompt"), list):
        return dict(problem) | {"env_class": "text2sql"}
    db_id, question, gold = first(problem, "db_id"), first(problem, settings.question), first(problem, SQL)
    database = settings.db_path / DATABASE_FOLDERS[settings.data] / db_id / f"{db_id}.sqlite"
    if not settings.keep_empty and not has_rows(gold, database):
        return None
    hints = "".join(f"Note: {problem[name]}\n\n" for name in KNOWLEDGE if problem.get(name))
    content = settings.template.substitute(schema=schema(database), knowledge=hints, question=question)
    return {
        "data_source": settings.data_source,
        "prompt": [{"role": "user", "content": content}],
        "env_class": "text2sql",
        "db_id": db_id,
        "data": settings.data,
        "reward_spec": {"method": "rule", "ground_truth": gold},
        "extra_info": {"split": split, "index": index, "question": question},
    }


@functools.cache
def schema(database: Path) -> str:
    """Return the CREATE TABLE statements of a database.

    Raises:
        TaskError: the database does not exist.
    """
    if not database.exists():
        raise TaskError(f"no database at {database}; db_path must be the parent folder, and --data must select the set")
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE type IN ('table', 'view') AND sql IS NOT NULL")
        return "\n".join(f"{sql};" for (sql,) in found)


def has_rows(query: str, database: Path) -> bool:
    """Test whether a query runs and has a result of at least one row."""
    schema(database)  # is there one?
    with closing(read_rows(str(database), query, QueryLimits(wall_seconds=GOLD_SECONDS))) as rows:
        try:
            return next(rows, None) is not None
        except QueryError:
            return False
