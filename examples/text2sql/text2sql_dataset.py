"""Writes questions to databases for `text2sql`, whose model may try queries before it settles on one.

    python examples/text2sql/text2sql_dataset.py --output_dir ~/data/sql --db_path ~/data/sql/db_files/data
    python examples/text2sql/text2sql_dataset.py --db_path DIR --data spider --input train_spider.json dev.json

Columns: `db_id`, `question` and `query` (or `SQL`, `sql`), with `evidence` or `external_knowledge` if there is any, as
Spider, BIRD and SynSQL are published. Or rows that are ready (`prompt`, `reward_spec`, `data`), which are kept as they
are: NovaSky-AI/SkyRL-SQL-653-data-newfmt, what is read from the hub unless told otherwise.

The databases are below --db_path where the environment looks for them, such as spider/database/ID/ID.sqlite; the
schema in the prompt is read from there. A question is left out if its query does not run, or gives no rows: then
whatever finds nothing would be right.
"""

import functools
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser

from skyrl_gym.envs.sql.env import DATABASE_FOLDERS
from skyrl_gym.envs.sql.examples import INSTRUCTIONS
from skyrl_gym.sandbox.sqlite import QueryError, QueryLimits, read_rows
from skyrl_train.errors import DataError

SQL = "query|SQL|sql"
KNOWLEDGE = ("evidence", "external_knowledge")
GOLD_SECONDS = 10.0
"""A gold query that takes longer is left out."""


def training_row(problem: Problem, split: str, index: int, data: str, db_path: Path) -> Row | None:
    if isinstance(problem.get("prompt"), list):
        return dict(problem) | {"env_class": "text2sql"}
    db_id, question, gold = problem["db_id"], problem["question"], first(problem, SQL)
    database = db_path / DATABASE_FOLDERS[data] / db_id / f"{db_id}.sqlite"
    if not gives_rows(gold, database):
        return None
    hints = [f"Note: {problem[name]}" for name in KNOWLEDGE if problem.get(name)]
    content = "\n\n".join([INSTRUCTIONS, f"Database:\n{schema(database)}", *hints, f"Question: {question}"])
    return {
        "data_source": data,
        "prompt": [{"role": "user", "content": content}],
        "env_class": "text2sql",
        "db_id": db_id,
        "data": data,
        "reward_spec": {"method": "rule", "ground_truth": gold},
        "extra_info": {"split": split, "index": index, "question": question},
    }


@functools.cache
def schema(database: Path) -> str:
    """The statements that made the tables. Raises DataError if there is no such database."""
    if not database.exists():
        raise DataError(f"there is no database at {database}; --db_path must be the folder above, --data say which set")
    with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE type IN ('table', 'view') AND sql IS NOT NULL")
        return "\n".join(f"{sql};" for (sql,) in found)


def gives_rows(query: str, database: Path) -> bool:
    schema(database)  # is there one?
    with closing(read_rows(str(database), query, QueryLimits(wall_seconds=GOLD_SECONDS))) as rows:
        try:
            return next(rows, None) is not None
        except QueryError:
            return False


def main(argv: list[str] | None = None) -> None:
    source = "NovaSky-AI/SkyRL-SQL-653-data-newfmt"
    parser = make_parser(__doc__, "~/data/sql", (f"{source}@train", f"{source}@validation"))
    parser.add_argument("--db_path", type=Path, default=Path("~/data/sql/db_files/data"), help="default: %(default)s")
    parser.add_argument("--data", choices=sorted(DATABASE_FOLDERS), default="spider", help="default: %(default)s")
    options = parser.parse_args(argv)
    make_row = functools.partial(training_row, data=options.data, db_path=options.db_path.expanduser())
    build(options, make_row, ("db_id", f"prompt|{SQL}"))


if __name__ == "__main__":
    main()
