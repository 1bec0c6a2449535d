"""Writes questions to databases for `text2sql`, whose model may try queries before it settles on one.

    python examples/text2sql/text2sql_dataset.py --output_dir ~/data/sql --db_path ~/data/sql/db_files/data
    python examples/text2sql/text2sql_dataset.py --db_path DIR --data spider --input train_spider.json dev.json

Columns: `db_id`, `question` and `query` (or `SQL`, `sql`), optionally `evidence` or `external_knowledge`, as Spider,
BIRD and SynSQL are published. Or prepared rows (`prompt`, `reward_spec`, `data`), which are kept unchanged:
NovaSky-AI/SkyRL-SQL-653-data-newfmt, the default hub dataset.

An evaluation set, such as the five in the tables of SkyRL-SQL (all of its questions, whatever they return):

    python examples/text2sql/text2sql_dataset.py --db_path DIR --input spider-realistic.json --only_validation \\
        --keep_empty --data_source spider_realistic --prompt_like ~/data/sql/train.parquet

--prompt_like takes the wording of the prompt from prepared rows and inserts schema, knowledge and question: between
"Database Schema:" and "This schema describes", after "External Knowledge:", and between "Question:" and
"Instructions:".

The databases are below --db_path where the environment looks for them, such as spider/database/ID/ID.sqlite; the
schema in the prompt is read from there. A question is omitted if its query fails or returns no rows: otherwise any
query without results would be correct.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path
from string import Template

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import build, make_parser, read_file

from skyrl_gym.datasets.databases import SQL, DatabaseRowSettings, text2sql_row
from skyrl_gym.envs.sql.env import DATABASE_FOLDERS
from skyrl_train.errors import DataError

PLACES = (
    ("schema", "Database Schema:\n", "\nThis schema describes"),
    ("knowledge", "External Knowledge:\n", "\nQuestion:"),
    ("question", "Question:\n", "\n\nInstructions:"),
)
"""Name, heading before and text after each part of a published prompt that differs from row to row."""


def template_of(prompt: str, source: str) -> Template:
    """Make a template of a prompt that is ready. Raises DataError if it has no schema or no question under the
    published headings."""
    parts, rest = [], prompt
    for name, before, after in PLACES:
        head, heading, tail = rest.partition(before)
        _, ending, tail = tail.partition(after)
        if not (heading and ending):
            if name == "knowledge":  # rows without any have no heading
                continue
            raise DataError(
                f"--prompt_like {source}: the first prompt has no {before.strip()!r} before {after.strip()!r}"
            )
        parts.append(f"{head}{heading}".replace("$", "$$") + f"${{{name}}}")
        rest = after + tail
    if not any("${knowledge}" in part for part in parts):
        parts[-1] = parts[-1].replace("Question:\n", "${knowledge}Question:\n")
    return Template("".join(parts) + rest.replace("$", "$$"))


def main(argv: list[str] | None = None) -> None:
    source = "NovaSky-AI/SkyRL-SQL-653-data-newfmt"
    parser = make_parser(__doc__, "~/data/sql", (f"{source}@train", f"{source}@validation"))
    parser.add_argument("--db_path", type=Path, default=Path("~/data/sql/db_files/data"), help="default: %(default)s")
    parser.add_argument("--data", choices=sorted(DATABASE_FOLDERS), default="spider", help="default: %(default)s")
    parser.add_argument("--data_source", help="name of the set in tables; default: that of --data")
    parser.add_argument("--question_column", default="question", help="default: %(default)s")
    parser.add_argument("--keep_empty", action="store_true", help="keep questions whose query gives no rows")
    parser.add_argument("--prompt_like", type=Path, help="file of rows that are ready, whose words the prompts get")
    options = parser.parse_args(argv)
    settings = DatabaseRowSettings(
        data=options.data,
        data_source=options.data_source or options.data,
        db_path=options.db_path.expanduser(),
        question=options.question_column,
        keep_empty=options.keep_empty,
    )
    if options.prompt_like is not None:
        ready = read_file(options.prompt_like.expanduser())[0]["prompt"][-1]["content"]
        settings = replace(settings, template=template_of(ready, str(options.prompt_like)))
    build(options, functools.partial(text2sql_row, settings=settings), ("db_id", f"prompt|{SQL}"))


if __name__ == "__main__":
    main()
