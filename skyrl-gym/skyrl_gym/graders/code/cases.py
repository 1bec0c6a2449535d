"""Test cases of an answer, and their forms in dataset rows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

from skyrl_gym.error import TaskError
from skyrl_gym.graders.code.answer_names import answer_names, needed_modules
from skyrl_gym.syntax_trees import parse_source


@dataclass(frozen=True)
class Case:
    """Something to put in, and what should come out."""

    input: str
    output: str


@dataclass(frozen=True)
class ProgramTests:
    """The answer is a program: standard input in, standard output out."""

    cases: Sequence[Case]


@dataclass(frozen=True)
class FunctionTests:
    """The answer is a function, or a method of a class `Solution`: one JSON value per line in for each argument, JSON
    out."""

    function: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class AssertTests:
    """Python test code that calls the names defined by the answer, a module, and asserts.

    Arguments and results are passed between two processes by value: plain data is copied, so a test does not see
    in-place changes of an argument, and an iterator is limited to 100,000 items. Any other object stays with the
    answer; a test may call it and get or set its attributes, but operators, `len` and iteration do not reach it. A test
    cannot pass a function or an object to the answer.
    """

    tests: Sequence[str]
    """Each is a case of its own. One that defines `check` is followed by `check(<entry_point>)`."""
    entry_point: str | None = None
    """The function asked for: it is always the answer's. Other names that the tests use and do not define are those of
    Python and its usual modules, else the answer's. Without it, `skyrl_gym.graders.code.answer_names` decides."""
    prompt: str = ""
    """Code that the answer goes on from, with functions that answer and tests may use."""
    setup: str = ""
    """Code to run before the tests, on their side."""

    @cached_property
    def answer_names(self) -> frozenset[str]:
        """The names in the tests that are the answer's. Raises TaskError if that cannot be decided."""
        return answer_names(self.tests, self.setup, self.prompt, self.entry_point)

    @cached_property
    def needed_modules(self) -> list[str]:
        """Modules that the tests cannot do without."""
        return needed_modules(self.tests, self.setup, self.prompt)


CodeTests = ProgramTests | FunctionTests | AssertTests


def parse_tests(ground_truth: Any) -> CodeTests:
    """Parse the tests of a dataset row.

    Args:
        ground_truth: JSON text or the decoded value: a list of tests, or `{"tests": [...]}` with, where they are Python
            code, `entry_point`, `prompt` and `setup`. A test is Python code (text), or an input with its output:
            `{"input": str, "output": str, "testtype": "stdin" | "functional", "metadata": {"func_name": str}}`, whose
            type and function are taken from the first one.

    Raises:
        TaskError: the text names the field, its value and the rule.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError as failure:
            raise TaskError(f"ground_truth must be JSON: {failure}; got {ground_truth!r:.200}") from failure
    row = ground_truth if isinstance(ground_truth, Mapping) else {"tests": ground_truth}
    unknown = row.keys() - {"tests", "entry_point", "prompt", "setup"}
    if unknown:
        raise TaskError(
            f"ground_truth has {', '.join(sorted(map(str, unknown)))}; allowed fields: tests, "
            "entry_point, prompt, setup"
        )
    tests = row.get("tests")
    if isinstance(tests, str):
        tests = [tests]
    if not _is_list(tests) or not tests:
        raise TaskError(f"ground_truth must have at least one test, in a list; got {tests!r:.200}")
    if isinstance(tests[0], str):
        return _parse_assert_tests(row, tests)
    first = _check_mapping(tests[0], 0)
    cases = tuple(_parse_case(_check_mapping(test, number), number) for number, test in enumerate(tests))
    match first.get("testtype", "stdin"):
        case "stdin":
            return ProgramTests(cases)
        case "functional":
            return _parse_function_tests(first, cases)
        case other:
            raise TaskError(f"testtype of test 0 must be stdin or functional; got {other!r:.200}")


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_mapping(test: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(test, Mapping):
        raise TaskError(f"test {number} must be an object with input and output, like the first; got {test!r:.200}")
    return test


def _parse_case(test: Mapping[str, Any], number: int) -> Case:
    for name in ("input", "output"):
        if not isinstance(test.get(name), str):
            raise TaskError(f"{name} of test {number} must be text; got {test.get(name)!r:.200}")
    return Case(test["input"], test["output"])


def _parse_function_tests(first: Mapping[str, object], cases: Sequence[Case]) -> FunctionTests:
    metadata = first.get("metadata")
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name.isidentifier():
        raise TaskError(f"metadata of test 0 must have func_name, as it is functional; got {metadata!r:.200}")
    for number, case in enumerate(cases):
        for field, texts in (("input", split_argument_lines(case)), ("output", [case.output])):
            for text in texts:
                try:
                    json.loads(text, parse_int=Decimal)  # of any number of digits
                except ValueError as failure:
                    raise TaskError(
                        f"{field} of test {number} must be JSON, as it is functional; got {text!r:.200}"
                    ) from failure
    return FunctionTests(name, cases)


def split_argument_lines(case: Case) -> list[str]:
    """Return the arguments of a function's case, each as JSON."""
    return [line for line in case.input.split("\n") if line.strip()]


def _parse_assert_tests(row: Mapping[str, Any], tests: Sequence[Any]) -> AssertTests:
    texts = {name: row.get(name) or "" for name in ("entry_point", "prompt", "setup")}
    for name, text in [*texts.items(), *((f"test {number}", test) for number, test in enumerate(tests))]:
        if not isinstance(text, str):
            raise TaskError(f"{name} must be Python code, as text; got {text!r:.200}")
        try:
            parse_source(text)
        except (SyntaxError, ValueError) as failure:
            raise TaskError(f"{name} must be Python code: {failure}; got {text!r:.200}") from failure
    parsed = AssertTests(tuple(tests), texts["entry_point"] or None, texts["prompt"], texts["setup"])
    parsed.answer_names  # noqa: B018 (raises TaskError now, not at the first answer)
    return parsed
