"""The functions under which LiveCodeBench's grading is known. The grading itself is in `skyrl_gym.graders.code`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.error import TaskError
from skyrl_gym.graders.code import CodeSettings, CodeTests, extract_code, grade_code, parse_tests
from skyrl_gym.graders.code.cases import FunctionTests, ProgramTests
from skyrl_gym.graders.results import Grade, Invalid, Score, Timeout, reward_of

WRONG_ANSWER = -2
TIME_LIMIT = -3
RUNTIME_ERROR = -4

extract_code_from_model = extract_code


def compute_score(model_response: str, tests: str | Sequence[Mapping[str, object]]) -> tuple[str | None, float]:
    """Grade a model's text. Returns the code in its last fenced block (None if there is none) and 1.0 or 0.0.

    Raises:
        TaskError: there is no test, or one is malformed.
        InfraError: the sandbox failed.
    """
    parsed = parse_tests(tests if isinstance(tests, str) else list(tests))
    code = extract_code(model_response)
    return code, 0.0 if code is None else reward_of(grade_code(code, parsed, _make_settings(_parse_cases(parsed))))


def lcb_check_correctness(
    sample: Sequence[Mapping[str, object]], generation: str, timeout: float = 6, debug: bool = False
) -> bool:
    """Check whether a program passes every test of a sample; `debug` prints the failure.

    Raises:
        TaskError: there is no test, or one is malformed.
        InfraError: the sandbox failed.
    """
    tests = parse_tests(list(sample))
    grade = grade_code(generation, tests, _make_settings(sample, timeout))
    if debug:
        print(grade)
    return reward_of(grade) == 1.0


def run_test(
    sample: Mapping[str, object], test: str | None = None, debug: bool = False, timeout: float = 6
) -> tuple[list[int | bool], dict[str, object]]:
    """Run a program on tests in order until one fails.

    Args:
        sample: `{"input_output": JSON text of {"inputs": [...], "outputs": [...], "fn_name": optional}}`.
        test: the program.

    Returns:
        True for each test passed, then, for one that failed, -2 (wrong answer), -3 (time limit) or -4 (does not
        compile or raises); and a dict that describes the failure (empty without one).

    Raises:
        TaskError: the sample is malformed.
        InfraError: the sandbox failed.
    """
    tests = _parse_tests(sample)
    results: list[int | bool] = []
    for case in tests.cases:
        grade = grade_code(test or "", dataclasses.replace(tests, cases=(case,)), _make_settings([case], timeout))
        if debug:
            print(grade)
        if reward_of(grade) == 1.0:
            results.append(True)
            continue
        code, message = _describe_failure(grade)
        return [*results, code], {"error_code": code, "error_message": message, "inputs": case.input}
    return results, {}


def _parse_tests(sample: Mapping[str, Any]) -> ProgramTests | FunctionTests:
    try:
        content = json.loads(sample["input_output"])
        cases = list(zip(content["inputs"], content["outputs"], strict=True))
    except (KeyError, TypeError, ValueError) as failure:
        raise TaskError(
            f"input_output must be JSON text with the same number of inputs and outputs: {failure!r}; got "
            f"{sample!r:.200}"
        ) from failure
    name = content.get("fn_name")
    kind = {"testtype": "functional", "metadata": {"func_name": name}} if name else {"testtype": "stdin"}
    tests = parse_tests([{"input": given, "output": expected, **kind} for given, expected in cases])
    assert isinstance(tests, ProgramTests | FunctionTests)
    return tests


def _describe_failure(grade: Grade) -> tuple[int, str]:
    """Return the result code of a failed test, and its description."""
    match grade:
        case Timeout():
            return TIME_LIMIT, "Time Limit Exceeded"
        case Invalid(reason=reason):
            return RUNTIME_ERROR, reason
        case Score(details={"error": str(error)}):
            return RUNTIME_ERROR, error
        case _:
            return WRONG_ANSWER, "Wrong Answer"


def _parse_cases(tests: CodeTests) -> Sequence[object]:
    return tests.cases if isinstance(tests, ProgramTests | FunctionTests) else tests.tests


def _make_settings(cases: Sequence[object], timeout: float = 6) -> CodeSettings:
    return CodeSettings(case_seconds=timeout, total_seconds=(timeout + 1) * len(cases) + 5)
