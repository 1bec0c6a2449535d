"""Tasks of benchmark suites: finds the published file of each, locally or on the hub, and makes its rows."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyrl_gym.datasets.function_calls import ANSWERS_FOLDER, load_accepted_calls
from skyrl_gym.datasets.hub import load_hub
from skyrl_gym.datasets.problems import Problem, Row
from skyrl_gym.error import Error, TaskError
from skyrl_gym.eval.rows import read_rows
from skyrl_gym.eval.suites import GROUPS, SUITES, Suite
from skyrl_gym.suggestions import did_you_mean

HUB = "hub:"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
EVALUATION_SPLITS = {"test", "dev", "valid", "validation"}
"""Words in the name of a file that say that it is for evaluation, where its folder has the name of the suite."""


@dataclass(frozen=True)
class DataOptions:
    """The values of `--data`.

    Attributes:
        by_suite: source of a suite or group, given as NAME=SOURCE: a path, or `hub:NAME[:CONFIG]@SPLIT[#REVISION]`.
        paths: files, and folders to search, for the suites that their names name.
    """

    by_suite: Mapping[str, str]
    paths: Sequence[Path]

    @classmethod
    def parse(cls, values: Iterable[str]) -> "DataOptions":
        """Raises Error if a value names no suite and is no path."""
        by_suite: dict[str, str] = {}
        paths = []
        for value in values:
            name, equals, source = value.partition("=")
            if equals and name in (*SUITES, *GROUPS):
                by_suite |= dict.fromkeys(GROUPS.get(name, (name,)), source)
            elif Path(value).expanduser().exists():
                paths.append(Path(value).expanduser())
            elif equals:
                raise Error(f"--data {value}: no suite {name!r}; {did_you_mean(name, [*SUITES, *GROUPS])}")
            else:
                raise Error(f"--data {value}: no such file or folder")
        return cls(by_suite, paths)

    def source_of(self, name: str, env_config: Mapping[str, object]) -> str:
        """Return where the tasks of a suite are: a path, or `hub:` and a name.

        Raises:
            Error: nowhere, or several files have the suite's name.
        """
        suite = SUITES[name]
        if name in self.by_suite:
            return self.by_suite[name]
        found = _find_files(name, [file for path in self.paths for file in _list_files(path)])
        if len(found) > 1:
            listed = ", ".join(map(str, found))
            raise Error(f"--data: several files may be {name}: {listed}; choose by --data {name}=FILE")
        if found:
            return str(found[0])
        if suite.file_below_databases is not None:
            published = Path(str(env_config["db_path"])) / suite.file_below_databases
            if published.is_file():
                return str(published)
        if suite.hub is not None:
            return HUB + suite.hub
        below = f", {suite.file_below_databases} is not below db_path" if suite.file_below_databases else ""
        raise Error(
            f"no file for suite {name}: no file under --data has its name{below}, and it is not on the hub; set "
            f"--data {name}=FILE"
        )


def _list_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    return [file for file in files if file.parent.name != ANSWERS_FOLDER]


def _find_files(name: str, files: Sequence[Path]) -> list[Path]:
    """Return the files with the suite's name; else those for evaluation in a folder of its name."""
    by_file = [file for file in files if _find_suite(file.name) == name]
    evaluation = [file for file in by_file if "train" not in _split_words(file.name)]
    if evaluation:
        return evaluation
    in_folder = [file for file in files if _find_suite(file.parent.name) == name]
    return [file for file in in_folder if EVALUATION_SPLITS & set(_split_words(file.name))]


def _find_suite(text: str) -> str | None:
    """Return the suite that a file's name names; the longest name counts, as in `parallel_multiple`.

    A name is any run of words: `MATH-500_test.jsonl` and `math500.json` both name `math500`.
    """
    words = _split_words(text)
    runs = {"".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}
    named = [
        (len(own), name)
        for name, suite in SUITES.items()
        for own in ("".join(_split_words(name)), *suite.file_names)
        if own in runs
    ]
    return max(named)[1] if named else None


def _split_words(text: str) -> list[str]:
    stem = next((text.removesuffix(suffix) for suffix in SUFFIXES if text.endswith(suffix)), text)
    return re.findall(r"[a-z0-9]+", stem.lower())


@dataclass(frozen=True)
class SuiteTasks:
    """Rows of a suite, the number of problems left out, and where they are from."""

    rows: list[Row]
    num_left_out: int
    source: str

    def text(self) -> str:
        """Return the rows as JSON lines."""
        return "".join(json.dumps(row) + "\n" for row in self.rows)


def tasks_of(name: str, suite: Suite, source: str, env_config: Mapping[str, object]) -> SuiteTasks:
    """Read a suite's problems and make its rows. Prepared rows (`prompt` and `env_class`) are kept as they are.

    Raises:
        Error: the source cannot be read, a problem is of another form, or nothing is left.
    """
    make_row = suite.make_rows(env_config)
    problems = _filter_by_source(name, suite, _read_problems(source))
    rows = []
    for index, problem in enumerate(problems):
        try:
            row = problem if _is_ready(problem, suite.env) else make_row(problem, "test", index)
        except TaskError as failure:
            raise TaskError(f"suite {name}: {source}, problem {index}: {failure}") from failure
        if row is not None:
            rows.append(row)
    if not rows:
        raise Error(f"suite {name}: {source} has no usable problem")
    return SuiteTasks(rows, len(problems) - len(rows), source)


def _read_problems(source: str) -> list[Problem]:
    if source.startswith(HUB):
        return _load_hub_problems(source.removeprefix(HUB))
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"--data: no such file {path}")
    answers = load_accepted_calls(path)
    problems = []
    for number, row in enumerate(read_rows(path)):
        if not isinstance(row, dict):
            raise TaskError(f"{path}, row {number}: must be a JSON object; got {row!r:.200}")
        problems.append(({"ground_truth": answers[row["id"]]} if row.get("id") in answers else {}) | row)
    return problems


@functools.lru_cache(maxsize=1)  # seven suites of one group are one set of the hub
def _load_hub_problems(name: str) -> list[Problem]:
    return [dict(row) for row in load_hub(name)]


def _filter_by_source(name: str, suite: Suite, problems: list[Problem]) -> list[Problem]:
    """Filter the problems by the suite's `data_source` in a file of several sets; else return all.

    Raises:
        Error: the problems belong to other suites.
    """
    if suite.data_source is None:
        return problems
    own = [problem for problem in problems if _get_source(problem) == suite.data_source]
    others = {_get_source(problem) for problem in problems} & {
        each.data_source for each in SUITES.values() if each.data_source
    }
    if not own and others:
        raise Error(f"suite {name}: the problems are of {', '.join(sorted(others))}, none of {name}")
    return own or problems


def _get_source(problem: Problem) -> str:
    return str(problem.get("data_source")).removeprefix("searchR1_")  # as rows that are ready have it


def _is_ready(problem: Problem, env: str) -> bool:
    """Test for a row that is ready. Raises TaskError if it is for another environment."""
    if "env_class" not in problem or not isinstance(problem.get("prompt"), list):
        return False
    if problem["env_class"] != env:
        raise TaskError(f"the row is for environment {problem['env_class']}; the suite's is {env}")
    return True
