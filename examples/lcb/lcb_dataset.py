"""Writes competitive programming problems for `lcb`, with tests in LiveCodeBench's form.

    python examples/lcb/lcb_dataset.py --output_dir ~/data/lcb
    python examples/lcb/lcb_dataset.py --output_dir ~/data/lcb --input train/livecodebench.json test/livecodebench.json

Columns:

    `problem`, `question_content` or `prompt`
    `tests` or `public_test_cases` (a list of `input`, `output`, `testtype`, or its JSON text); or `inputs`, `outputs`
    `starter_code`, if a method of a class is asked for, and `metadata` with its `func_name`

LiveCodeBench's private tests are pickles, which are not read: a pickle can do anything to who opens it.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dataset_files import Problem, Row, build, first, make_parser

from skyrl_train.errors import DataError

TASK = "You are given a programming problem. Write a correct Python program that solves it and passes all tests."
STDIN_FORMAT = (
    "Read the input from standard input, and print the answer to standard output. Do not try it on the examples "
    "yourself. Put the whole program in a block like this:\n```python\n# your code\n```"
)
STARTER_FORMAT = "Complete this code, and put all of it in a block like this:\n```python\n{starter_code}\n```"
TESTS = "tests|public_test_cases|inputs"


def training_row(problem: Problem, split: str, index: int) -> Row | None:
    tests = tests_of(problem)
    if not tests:
        return None
    question = first(problem, "problem|question_content|prompt").strip()
    starter_code = (problem.get("starter_code") or "").strip()
    answer_format = STARTER_FORMAT.format(starter_code=starter_code) if starter_code else STDIN_FORMAT
    return {
        "data_source": "livecodebench",
        "prompt": [{"role": "user", "content": f"{TASK}\n\n{question}\n\n### Format:\n{answer_format}\n\n### Answer:"}],
        "env_class": "lcb",
        "ability": "code",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {"split": split, "index": index, "reference": problem.get("solution") or ""},
    }


def tests_of(problem: Problem) -> list[dict[str, Any]]:
    """Raises DataError on tests of another form."""
    found = first(problem, TESTS)
    if found is problem.get("inputs"):
        pairs = zip(found, problem["outputs"], strict=True)
        found = [{"input": given, "output": expected, "testtype": "stdin"} for given, expected in pairs]
    tests = json.loads(found) if isinstance(found, str) else found
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise DataError(f"tests must be a list of objects with input and output; got {found!r:.200}")
    metadata = problem.get("metadata") or {}
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    return [({"metadata": {"func_name": name}} if name else {}) | _without_none(test) for test in tests]


def _without_none(test: dict[str, Any]) -> dict[str, Any]:
    """Parquet gives every row the fields of all."""
    return {key: value for key, value in test.items() if value is not None}


def main(argv: list[str] | None = None) -> None:
    source = "agentica-org/DeepCoder-Preview-Dataset:lcbv5"
    parser = make_parser(__doc__, "~/data/lcb", (f"{source}@train", f"{source}@test"))
    build(parser.parse_args(argv), training_row, ("problem|question_content|prompt", TESTS))


if __name__ == "__main__":
    main()
