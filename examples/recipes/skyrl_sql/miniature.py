"""Miniature of SkyRL-SQL: training with several turns helps even with one turn at evaluation; training with one turn
does not help with several.

    python examples/recipes/skyrl_sql/miniature.py [--seeds 0 1 2] [--steps 20] [--jobs 2] [--output FOLDER]

Questions to generated SQLite databases; the environment is `text2sql`. A model of 0.14 million parameters is warmed up
on queries of four parts, mostly of another SQL dialect, which SQLite refuses with an error that names the part. The
warm-up demonstrates replacing such a part, but more often it submits the refused query. The model is then trained by
the scripts `run_qwen2.5_coder_7b_single_turn.sh` and `run_qwen2.5_coder_7b.sh` (six turns), and evaluated with one turn
and with five on other databases. A run that is complete in `--output` is not repeated.
"""

import asyncio
import json
import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.parquet
from growing_message import Demonstration, phrase_tokenizer, prepare_model
from hydra import compose, initialize_config_dir
from miniatures import (
    REPOSITORY,
    SIZES,
    VARIABLES,
    Difference,
    Metrics,
    argument_parser,
    draw_curves,
    markdown_table,
    train,
)

import skyrl_gym
from skyrl_gym.envs.sql.examples import INSTRUCTIONS
from skyrl_train.config import config_dir
from skyrl_train.config.validation import validate_generator_cfg
from skyrl_train.entrypoints.main_generate import EvalOnlyEntrypoint

HERE = Path(__file__).resolve().parent
BUILDER = REPOSITORY / "examples" / "text2sql" / "text2sql_dataset.py"
SINGLE, SEVERAL = "trained on 1 turn", "trained on 6 turns"
ARMS = {SINGLE: ("run_qwen2.5_coder_7b_single_turn.sh", 1), SEVERAL: ("run_qwen2.5_coder_7b.sh", 6)}
"""Script of each arm, and its number of turns."""
SCRIPT = HERE / ARMS[SEVERAL][0]
EVALUATION_TURNS = (1, 5)
SET = "small_databases"

LENGTHS = [
    "trainer.max_prompt_length=64",
    "generator.max_input_length=440",
    "generator.sampling_params.max_generate_length=24",
    "generator.eval_sampling_params.max_generate_length=24",
]
SETTINGS = [
    *LENGTHS,
    "trainer.train_batch_size=32",
    "trainer.policy_mini_batch_size=32",
    "trainer.micro_forward_batch_size_per_gpu=80",
    "trainer.micro_train_batch_size_per_gpu=80",
    "trainer.policy.optimizer_config.lr=4e-4",
    "trainer.policy.optimizer_config.num_warmup_steps=2",
]
"""Sizes in place of the published ones."""

ONE_TURN = {1: ["generator.max_input_length=64"]}
"""With one turn, the prompt is all the engine is given: settings by number of turns."""


# ---- databases and questions


@dataclass(frozen=True)
class Kind:
    """A kind of question: the role of the column that it is about, SQLite's function and arguments, and functions of
    other dialects, which SQLite does not have."""

    question: str
    role: str
    function: str
    arguments: str
    foreign: tuple[str, str, str]


KINDS = (
    Kind("Each name in capitals?", "name", "upper(", "{})", ("UCASE(", "TO_UPPER(", "UPPERCASE(")),
    Kind("The day number of each date?", "date", "julianday(", "{})", ("TO_DAYS(", "DAYS(", "DATE_SERIAL(")),
    Kind("Each number without its sign?", "number", "abs(", "{})", ("ABSOLUTE(", "MAGNITUDE(", "ABSVAL(")),
    Kind("Each name in small letters?", "name", "lower(", "{})", ("LCASE(", "TO_LOWER(", "LOWERCASE(")),
    Kind("How long is each name?", "name", "length(", "{})", ("LEN(", "CHAR_LENGTH(", "DATALENGTH(")),
    Kind("The first letter of each name?", "name", "substr(", "{}, 1, 1)", ("LEFTMOST(", "MID(", "LEFTSTR(")),
    Kind("Where is an a in each name?", "name", "instr(", "{}, 'a')", ("STRPOS(", "CHARINDEX(", "LOCATE(")),
    Kind("The code of each name?", "name", "unicode(", "{})", ("ASCII(", "ORD(", "CODEPOINT(")),
    Kind("The year of each date?", "date", "strftime('%Y', ", "{})", ("YEAR(", "EXTRACT('year', ", "DATE_PART('y', ")),
    Kind(
        "The month of each date?", "date", "strftime('%m', ", "{})", ("MONTH(", "EXTRACT('month', ", "DATE_PART('m', ")
    ),
    Kind("Each number, or 0?", "number", "ifnull(", "{}, 0)", ("NVL(", "IFNONE(", "NZ(")),
    Kind("Each number, but at least 50?", "number", "max(", "{}, 50)", ("GREATEST(", "LARGER(", "MAXIMUM(")),
)
SELECT, FOREIGN_VERBS = "SELECT ", ("FIND ", "GET ", "SHOW ")
FOREIGN_ARGUMENTS = ("{} USING utf8)", "{} FOR 1)", "{} WITH ci)")
LIMIT, FOREIGN_LIMITS = " LIMIT 2", (" FETCH 2", " TOP 2", " ROWNUM 2")
"""Parts of a query that are the same for all questions, and those of other dialects, which SQLite's grammar lacks."""
ERRORS = {
    "no such function": "function",
    'near "FIND"': "verb",
    'near "GET"': "verb",
    'near "SHOW"': "verb",
    'near "2"': "limit",
    'near "USING"': "arguments",
    'near "FOR"': "arguments",
    'near "WITH"': "arguments",
}
"""Beginning of SQLite's message -> the part of the query that it refuses."""
ERROR = "Error executing SQL: "
TABLES = ("ship", "singer", "bridge", "garden", "museum", "comet", "festival", "canal")
COLUMNS = {
    "name": ("title", "label", "nick", "heading", "caption", "alias"),
    "date": ("born", "founded", "opened", "seen", "built", "signed"),
    "number": ("weight", "height", "visits", "votes", "depth", "price"),
}
NAMES = ("Ada", "Bo", "Clara", "Dan", "Eva", "Finn", "Gail", "Hal", "Ida", "Jan")
NUM_DATABASES = 104
NUM_HELD_OUT = 8


@dataclass(frozen=True)
class Database:
    """One table with a column for each role."""

    table: str
    columns: dict[str, str]

    @property
    def db_id(self) -> str:
        return "_".join([self.table, *self.columns.values()])

    def options(self, kind: Kind) -> dict[str, tuple[str, ...]]:
        """Return what each part of a query may be: SQLite's way first, then those that SQLite refuses."""
        return {
            "verb": (SELECT, *FOREIGN_VERBS),
            "function": (kind.function, *kind.foreign),
            "arguments": (kind.arguments, *FOREIGN_ARGUMENTS),
            "limit": (LIMIT, *FOREIGN_LIMITS),
        }

    def query(self, kind: Kind, parts: Mapping[str, str]) -> str:
        call = parts["function"] + parts["arguments"].format(self.columns[kind.role])
        return f"{parts['verb']}{call} FROM {self.table}{parts['limit']}"

    def gold(self, kind: Kind) -> str:
        return self.query(kind, {name: ways[0] for name, ways in self.options(kind).items()})

    def write(self, db_path: Path) -> None:
        folder = db_path / "spider" / "database" / self.db_id
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(self.db_id)
        days = [f"{draw.randint(1900, 1999)}-{draw.randint(10, 12)}-{draw.randint(10, 28)}" for _ in range(3)]
        rows = [*zip(draw.sample(NAMES, 3), days, draw.sample(range(-99, 100), 3), strict=True)]
        name, date, number = self.columns.values()
        # `closing` closes the connection, the connection as a context commits.
        with closing(sqlite3.connect(folder / f"{self.db_id}.sqlite")) as connection, connection:
            connection.execute(f"DROP TABLE IF EXISTS {self.table}")
            connection.execute(f"CREATE TABLE {self.table} ({name} TEXT, {date} TEXT, {number} INTEGER)")
            connection.executemany(f"INSERT INTO {self.table} VALUES (?, ?, ?)", rows)


@cache
def databases() -> list[Database]:
    """Return the databases, the same for all seeds; the last `NUM_HELD_OUT` are for evaluation."""
    draw = random.Random(0)
    every = list(product(TABLES, *COLUMNS.values()))
    chosen = draw.sample(every, NUM_DATABASES)
    return [Database(table, dict(zip(COLUMNS, columns, strict=True))) for table, *columns in chosen]


def asked(kind: Kind, turns: int) -> str:
    """Return a question's text. It says how many turns there are, as nothing else in the prompt does."""
    return f"{turns} turns. {kind.question}"


# ---- demonstrations


TRY, REPAIR, DIRECT = "I try a query.", "I repair the query.", "I answer at once."
SURE, UNSURE = "I take this query.", "I take another query."

RIGHT = 0.18
"""Probability that a part of a query is SQLite's; each of three others has 0.27, so a greedy answer has none right."""
REPAIRS, BELIEVES, FORGETS = 0.45, 0.45, 0.05
"""Probability that a refused part is exchanged (else the refused query is the solution); that a query with rows is the
solution (else one with another part is); that the thought before the solution is left out, which breaks the form."""


@dataclass(frozen=True)
class Demonstrations:
    """Queries of mixed dialects, and ways to deal with what a query gave, most of them wrong.

    With one turn the solution comes at once. With more, a query comes first: see `REPAIRS`, `BELIEVES` and `FORGETS`.
    """

    rows: Sequence[dict[str, Any]]
    db_path: Path

    def __call__(self, draw: random.Random) -> Demonstration:
        row = draw.choice(self.rows)
        database = _database_of(row["db_id"])
        turns, kind = _kind_of(row["extra_info"]["question"])
        return Demonstration(row["prompt"], list(self._pieces(database, kind, turns, draw)))

    def _pieces(self, database: Database, kind: Kind, turns: int, draw: random.Random) -> Iterator[tuple[str, bool]]:
        options = database.options(kind)
        parts = _any_parts(options, draw)
        if turns == 1:
            yield _say(DIRECT, "solution", database.query(kind, parts))
            return
        tried = {name: {part} for name, part in parts.items()}
        for turns_left in range(turns - 1, 0, -1):
            query = database.query(kind, parts)
            observation = _observation(self.db_path, database.db_id, query, turns_left)
            yield _say(TRY if turns_left == turns - 1 else REPAIR, "sql", query)
            yield observation, False
            refused = refused_part(observation)
            if draw.random() < FORGETS:
                yield f"<solution>{query}</solution>", True
                return
            if turns_left == 1 or not refused or draw.random() >= REPAIRS:
                break
            others = [part for part in options[refused] if part not in tried[refused]]
            parts[refused] = draw.choice(others or options[refused])
            tried[refused].add(parts[refused])
        if refused or draw.random() < BELIEVES:
            yield _say(SURE, "solution", query)
        else:
            name = draw.choice(list(options))
            other = draw.choice([part for part in options[name] if part != parts[name]])
            yield _say(UNSURE, "solution", database.query(kind, parts | {name: other}))


def refused_part(observation: str) -> str | None:
    """Return the part of a query that SQLite's error names; None without an error."""
    return next((part for text, part in ERRORS.items() if ERROR + text in observation), None)


def _say(thought: str, tag: str, text: str) -> tuple[str, bool]:
    return f"<think>{thought}</think><{tag}>{text}</{tag}>", True


def _any_parts(options: Mapping[str, Sequence[str]], draw: random.Random) -> dict[str, str]:
    """Draw each part of a query, SQLite's with a probability of `RIGHT`."""
    return {name: own[0] if draw.random() < RIGHT else draw.choice(own[1:]) for name, own in options.items()}


@cache
def _database_of(db_id: str) -> Database:
    return next(database for database in databases() if database.db_id == db_id)


@cache
def _kind_of(question: str) -> tuple[int, Kind]:
    turns, _, rest = question.partition(" turns. ")
    return int(turns), next(kind for kind in KINDS if kind.question == rest)


@cache
def _observation(db_path: Path, db_id: str, query: str, turns_left: int) -> str:
    """Return the environment's observation after a query, given the number of turns left."""
    extras = {"db_id": db_id, "data": "spider", "reward_spec": {"ground_truth": query}, "max_turns": turns_left + 1}
    env = skyrl_gym.make("text2sql", env_config={"db_path": str(db_path)}, extras=extras)
    return env.step(f"<think></think><sql>{query}</sql>")["observations"][0]["content"]


def tokenizer_phrases() -> list[str]:
    frame = [
        f"{INSTRUCTIONS}\n\nDatabase:\n",
        "CREATE TABLE ",
        " (",
        " TEXT, ",
        " INTEGER);",
        "\n\nQuestion: ",
        " turns. ",
    ]
    reminders = [
        f"\n<reminder>You have {left} turns left to complete the task.</reminder></observation>\n\n"
        for left in range(6)
    ]
    observation = ["\n\n<observation>", *(ERROR + text for text in ERRORS), ": …", *reminders]
    tags = [f"<{slash}{tag}>" for tag in ("think", "sql", "solution") for slash in ("", "/")]
    functions = [function for kind in KINDS for function in (kind.function, *kind.foreign)]
    forms = [*(kind.arguments for kind in KINDS), *FOREIGN_ARGUMENTS]
    arguments = [part for form in forms for part in form.split("{}") if part]
    names = [*TABLES, *COLUMNS, *(column for own in COLUMNS.values() for column in own), *NAMES]
    thoughts = [TRY, REPAIR, SURE, UNSURE, DIRECT]
    questions = [kind.question for kind in KINDS]
    return [
        *frame,
        *observation,
        *tags,
        *functions,
        *arguments,
        LIMIT,
        *FOREIGN_LIMITS,
        *names,
        *thoughts,
        *questions,
        SELECT,
        *FOREIGN_VERBS,
        " FROM ",
    ]


# ---- runs


def prepare(output: Path, steps: int) -> None:
    """Make databases, data and the model, the same for all seeds, unless the folder has them."""
    db_path = output / "databases"
    training, held_out = databases()[:-NUM_HELD_OUT], databases()[-NUM_HELD_OUT:]
    turns_of_data = sorted({*EVALUATION_TURNS, *(turns for _, turns in ARMS.values())})
    if not (output / "data").exists():
        for database in databases():
            database.write(db_path)
        for turns in turns_of_data:
            _write_data(output / "data_being_made" / str(turns), db_path, turns, training, held_out)
        (output / "data_being_made").rename(output / "data")
    files = [output / "data" / str(turns) / "train.parquet" for turns in turns_of_data]
    prepare_model(
        output / "model",
        phrase_tokenizer(tokenizer_phrases()),
        Demonstrations([row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()], db_path),
        hidden_size=64,
        num_layers=2,
        seed=0,
        steps=steps,
        batch_size=32,
        learning_rate=4e-3,
    )


def _write_data(
    folder: Path, db_path: Path, turns: int, training: Sequence[Database], held_out: Sequence[Database]
) -> None:
    """Write the questions for a number of turns with the recipe's builder: train.parquet and validation.parquet, and a
    copy of the latter at the path of the recipe's evaluation set.
    """
    folder.mkdir(parents=True)
    files = {"train": folder / "train.jsonl", "test": folder / "test.jsonl"}
    for file, own in zip(files.values(), (training, held_out), strict=True):
        rows = [
            {"db_id": database.db_id, "question": asked(kind, turns), "query": database.gold(kind)}
            for database in own
            for kind in KINDS
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for output, options in (
        (folder, ["--input", *map(str, files.values())]),
        (folder / SET, ["--only_validation", "--input", str(files["test"])]),
    ):
        own = ["--output_dir", str(output), "--db_path", str(db_path), "--data_source", SET, *options]
        subprocess.run([sys.executable, str(BUILDER), *own], check=True, stdout=subprocess.DEVNULL)


def train_arm(folder: Path, seed: int, arm: str, steps: int) -> Metrics:
    script, turns = ARMS[arm]
    settings = [
        *SETTINGS,
        *ONE_TURN.get(turns, []),
        f"trainer.seed={seed}",
        f"trainer.hf_save_interval={steps}",
        f"trainer.export_path={folder / arm.replace(' ', '_') / 'exports'}",
    ]
    variables = {
        "MODEL": str(folder.parent / "model"),
        "DATA_DIR": str(folder.parent / "data" / str(turns)),
        "DB_PATH": str(folder.parent / "databases"),
    }
    return train(HERE / script, folder / arm.replace(" ", "_"), settings, variables, steps)


def evaluate(folder: Path, name: str, model: Path, turns: int) -> float:
    """Return the greedy execution accuracy of a model on the held-out databases, as `run_evaluation.sh` measures it."""
    result = folder / "evaluations" / f"{name}_{turns}.json".replace(" ", "_")
    if not result.exists():
        variables = {
            "PYTHON": "echo",  # the script's own settings, without a second copy of them here
            "MODEL": str(model),
            "ROW": name.replace(" ", "_"),
            "SETS": SET,
            "EVAL_TURNS": str(turns),
            "DATA_DIR": str(folder.parent / "data" / str(turns)),
            "DB_PATH": str(folder.parent / "databases"),
            "OUTPUT": str(folder / "evaluations"),
        }
        command = [
            "bash",
            str(HERE / "run_evaluation.sh"),
            *SIZES,
            *LENGTHS,
            *ONE_TURN.get(turns, []),
            f"trainer.run_dir={folder / 'evaluations'}",
        ]
        done = subprocess.run(
            command, env=os.environ | VARIABLES | variables, check=True, capture_output=True, text=True
        )
        with initialize_config_dir(config_dir, version_base=None):
            config = validate_generator_cfg(
                compose("ppo_base_config", overrides=done.stdout.splitlines()[0].split()[2:])
            )
        asyncio.run(EvalOnlyEntrypoint(config).evaluate())
        answers = folder / "evaluations" / "skyrl_sql" / f"{variables['ROW']}_{turns}_turns" / "dumped_evals"
        scores = [
            json.loads(line)["score"] for line in (answers / "eval_only" / f"{SET}.jsonl").read_text().splitlines()
        ]
        result.write_text(json.dumps(sum(score == 1 for score in scores) / len(scores)))
    return json.loads(result.read_text())


def accuracies(folder: Path, steps: int) -> dict[tuple[str, int], float]:
    """Return the accuracy of the warmed-up model and of each arm's, by name and turns of the evaluation."""
    exports = {arm: folder / arm.replace(" ", "_") / "exports" / f"global_step_{steps}" / "policy" for arm in ARMS}
    models = {"warmed up": folder.parent / "model", **exports}
    return {
        (name, turns): evaluate(folder, name, model, turns)
        for name, model in models.items()
        for turns in EVALUATION_TURNS
    }


def report(found: Sequence[dict[tuple[str, int], float]], seeds: Sequence[int]) -> str:
    """Return the tables: accuracy of every model with 1 and 5 turns by seed, and the claims' differences over seeds."""
    heads = ["evaluated with", "model", *(f"seed {seed}" for seed in seeds), "mean"]
    rows = []
    for turns, name in product(EVALUATION_TURNS, ("warmed up", *ARMS)):
        values = [own[name, turns] for own in found]
        rows.append([f"{turns} turn{'s'[: turns > 1]}", name, *(f"{value:.3f}" for value in [*values, fmean(values)])])
    one, five = EVALUATION_TURNS
    claims = {
        "1 turn: trained on 6 turns - trained on 1 turn": [own[SEVERAL, one] - own[SINGLE, one] for own in found],
        "5 turns: trained on 6 turns - trained on 1 turn": [own[SEVERAL, five] - own[SINGLE, five] for own in found],
        "trained on 1 turn: 5 turns - 1 turn": [own[SINGLE, five] - own[SINGLE, one] for own in found],
        "trained on 6 turns: 5 turns - 1 turn": [own[SEVERAL, five] - own[SEVERAL, one] for own in found],
    }
    differences = [[name, str(Difference(tuple(values)))] for name, values in claims.items()]
    return "\n\n".join(
        [markdown_table(heads, rows), markdown_table(["difference", "mean [95 % interval]"], differences)]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, "skyrl_sql", steps=20, warm_up_steps=500)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args(argv)
    output = options.output.resolve()
    with ThreadPoolExecutor(options.jobs) as pool:
        prepare(output, options.warm_up_steps)
        futures = {
            arm: [pool.submit(train_arm, output / str(seed), seed, arm, options.steps) for seed in options.seeds]
            for arm in ARMS
        }
        runs = {arm: [future.result() for future in own] for arm, own in futures.items()}
    found = [accuracies(output / str(seed), options.steps) for seed in options.seeds]
    panels = {"reward/avg_raw_reward": "reward in training", "eval/all/avg_score": "evaluation, own number of turns"}
    picture = draw_curves(output / "curves.png", panels, runs)
    print(f"\n{report(found, options.seeds)}\n\npicture: {picture}")


if __name__ == "__main__":
    main()
