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
    """Choices for the rows of one set.

    Attributes:
        data: the databases' family, a key of `DATABASE_FOLDERS`.
        data_source: name of the set in tables.
        question: columns "a|b" with the question.
        keep_empty: keep questions whose query gives no rows.
        template: prompt with places for `schema`, `knowledge` and `question`.
    """

    data: str
    data_source: str
    db_path: Path
    question: str = "question"
    keep_empty: bool = False
    template: Template = OURS


def text2sql_row(problem: Problem, split: str, index: int, settings: DatabaseRowSettings) -> Row | None:
    """Make a row of `db_id`, question, `query`, `SQL` or `sql`. A row that is ready (`prompt` of messages) is kept.

    Returns: None for a question whose query does not run or gives no rows, unless `keep_empty`.
    """
    if isinstance(problem.get("prompt"), list):
        return dict(problem) | {"env_class": "text2sql"}
    db_id, question, gold = first(problem, "db_id"), first(problem, settings.question), first(problem, SQL)
    database = settings.db_path / DATABASE_FOLDERS[settings.data] / db_id / f"{db_id}.sqlite"
    if not settings.keep_empty and not gives_rows(gold, database):
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
    """Return the statements that made the tables.

    Raises:
        TaskError: there is no such database.
    """
    if not database.exists():
        raise TaskError(f"there is no database at {database}; db_path must be the folder above, --data say which set")
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE type IN ('table', 'view') AND sql IS NOT NULL")
        return "\n".join(f"{sql};" for (sql,) in found)


def gives_rows(query: str, database: Path) -> bool:
    """Test whether a query runs and has a result of at least one row."""
    schema(database)  # is there one?
    with closing(read_rows(str(database), query, QueryLimits(wall_seconds=GOLD_SECONDS))) as rows:
        try:
            return next(rows, None) is not None
        except QueryError:
            return False
