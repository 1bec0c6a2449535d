"""Rows of programming problems: MBPP, HumanEval and CodeContests for `code`, LiveCodeBench for `lcb`."""

import ast
import json
import warnings
from typing import Any

from skyrl_gym.datasets.problems import Problem, Row, first
from skyrl_gym.error import TaskError
from skyrl_gym.syntax_trees import parse_source

CODE_FORMAT = "Put the code in a ```python block."

LCB_TASK = "You are given a programming problem. Write a correct Python program that solves it and passes all tests."
STDIN_FORMAT = (
    "Read the input from standard input, and print the answer to standard output. Do not try it on the examples "
    "yourself. Put the whole program in a block like this:\n```python\n# your code\n```"
)
STARTER_FORMAT = "Complete this code, and put all of it in a block like this:\n```python\n{starter_code}\n```"
LCB_TESTS = "tests|public_test_cases|inputs"


def code_row(problem: Problem, split: str, index: int) -> Row | None:
    """Make a row of one of the published forms (see `parse_task`). Returns: None for a problem without tests."""
    question, ground_truth, reference = parse_task(problem)
    if not ground_truth["tests"]:
        return None
    return {
        "data_source": str(problem.get("data_source") or "code"),
        "prompt": [{"role": "user", "content": f"{question.strip()}\n\n{CODE_FORMAT}"}],
        "env_class": "code",
        # JSON text, because tests are texts in one set and mappings in another
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(ground_truth)},
        "extra_info": {"split": split, "index": index, "reference": reference},
    }


def parse_task(problem: Problem) -> tuple[str, dict[str, Any], str]:
    """Return question, tests, and a solution if there is one, of a problem of MBPP, CodeContests or HumanEval."""
    if problem.get("test_list") is not None:
        return parse_mbpp_task(problem)
    if problem.get("inputs") is not None:
        question = f"{first(problem, 'prompt|description')}\n\nRead standard input, and write to standard output."
        return question, {"tests": build_input_output_tests(problem["inputs"], first(problem, "outputs"))}, ""
    prompt, name = first(problem, "prompt"), first(problem, "entry_point")
    reference = problem.get("canonical_solution")
    ground_truth = {"tests": [first(problem, "test")], "entry_point": name, "prompt": prompt}
    return f"Complete this function:\n\n{prompt}", ground_truth, f"{prompt}{reference}" if reference else ""


def parse_mbpp_task(problem: Problem) -> tuple[str, dict[str, Any], str]:
    """Parse an MBPP problem like `parse_task`. The first test is shown, since the question does not name the
    function.
    """
    tests, reference = list(problem["test_list"]), problem.get("code") or ""
    question = f"{first(problem, 'text|prompt')}\n\nIt must pass tests such as this one:\n{tests[0] if tests else ''}"
    ground_truth = {"tests": tests, "setup": problem.get("test_setup_code") or ""}
    name = find_requested_function(tests, reference)
    return question, ground_truth | ({"entry_point": name} if name else {}), reference


def find_requested_function(tests: list[str], reference: str) -> str | None:
    """Return the function that the reference defines and the first test uses."""
    if not tests or not reference:
        return None
    with warnings.catch_warnings(action="ignore"):  # of escapes in texts that are not ours
        test, module = parse_source(tests[0]), parse_source(reference)
    used = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    return next((name for name in used if name in defined), None)


def build_input_output_tests(inputs: list[str], outputs: list[str]) -> list[dict[str, str]]:
    """Pair inputs with outputs."""
    return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]


def lcb_row(problem: Problem, split: str, index: int) -> Row | None:
    """Make a row of `problem`, `question_content` or `prompt`, and tests (see `parse_lcb_tests`).

    Returns: None for a problem without tests.
    """
    tests = parse_lcb_tests(problem)
    if not tests:
        return None
    question = first(problem, "problem|question_content|prompt").strip()
    starter_code = (problem.get("starter_code") or "").strip()
    form = STARTER_FORMAT.format(starter_code=starter_code) if starter_code else STDIN_FORMAT
    return {
        "data_source": "livecodebench",
        "prompt": [{"role": "user", "content": f"{LCB_TASK}\n\n{question}\n\n### Format:\n{form}\n\n### Answer:"}],
        "env_class": "lcb",
        "ability": "code",
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {"split": split, "index": index, "reference": problem.get("solution") or ""},
    }


def parse_lcb_tests(problem: Problem) -> list[dict[str, Any]]:
    """Return `tests` or `public_test_cases` (a list of objects, or its JSON text), or `inputs` with `outputs`.

    Raises:
        TaskError: tests of another form.
    """
    found = first(problem, LCB_TESTS)
    if found is problem.get("inputs"):
        pairs = zip(found, first(problem, "outputs"), strict=True)
        found = [{"input": given, "output": expected, "testtype": "stdin"} for given, expected in pairs]
    tests = json.loads(found) if isinstance(found, str) else found
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise TaskError(f"tests must be a list of objects with input and output; got {found!r:.200}")
    metadata = problem.get("metadata") or {}
    name = (json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name")
    return [({"metadata": {"func_name": name}} if name else {}) | _remove_none(test) for test in tests]


def _remove_none(test: dict[str, Any]) -> dict[str, Any]:
    """Remove None values: in Parquet every row has the union of all fields."""
    return {key: value for key, value in test.items() if value is not None}
