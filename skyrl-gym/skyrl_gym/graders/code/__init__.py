"""Grading of code: `extract_code` finds it, `parse_tests` reads a row's tests, `grade_code` runs one with the other.

The answer runs in a sandbox that never holds an expected output or a line of test code. Inputs go in and outputs come
out; comparison happens here, or, where tests are Python code, in a second sandbox, to which only plain values cross. So
an answer that exits early, prints verdicts, patches built-in functions or returns objects that equal everything is
judged like any other.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_gym.error import InfraError
from skyrl_gym.graders.code.answer import extract_code
from skyrl_gym.graders.code.cases import (
    AssertTests,
    Case,
    CodeTests,
    FunctionTests,
    ProgramTests,
    parse_tests,
)
from skyrl_gym.graders.code.channel import DeadlineExceeded
from skyrl_gym.graders.code.processes import CaseResult, DoesNotCompile, DoesNotLoad, NewSandbox, SolutionProcess
from skyrl_gym.graders.results import Grade, Invalid, Score, Timeout
from skyrl_gym.sandbox import Limits, make_sandbox

__all__ = [
    "AssertTests",
    "Case",
    "CodeSettings",
    "CodeTests",
    "FunctionTests",
    "ProgramTests",
    "extract_code",
    "grade_answer",
    "grade_code",
    "parse_tests",
]

SHOWN = 500
"""Characters of an input or output that the details of a grade show."""


@dataclass(frozen=True, kw_only=True)
class CodeSettings:
    """Settings of running a program and of scoring its test cases."""

    case_seconds: float = 6.0
    """Time limit of one test case, in seconds; also of loading the program."""

    total_seconds: float = 120.0
    """Time limit of all test cases of one program together, in seconds."""

    memory_bytes: int = 1 << 30
    """Memory limit of the program's process, in bytes."""

    partial_credit: bool = False
    """False: score 1 if every case passes, else 0, and stop at the first failure. True: run every case; the score is
    the fraction that passes."""

    def __post_init__(self) -> None:
        for name in ("case_seconds", "total_seconds", "memory_bytes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0; got {getattr(self, name)!r}")


def grade_answer(
    text: str, tests: CodeTests, settings: CodeSettings | None = None, *, new_sandbox: NewSandbox = make_sandbox
) -> Grade:
    """Grade the last fenced block of a model's text; `Invalid` without one. See `grade_code`."""
    code = extract_code(text)
    return (
        Invalid("no fenced code block") if code is None else grade_code(code, tests, settings, new_sandbox=new_sandbox)
    )


def grade_code(
    code: str, tests: CodeTests, settings: CodeSettings | None = None, *, new_sandbox: NewSandbox = make_sandbox
) -> Grade:
    """Run a program on its tests.

    Returns:
        Score: 1 or 0 (see `CodeSettings.partial_credit`). The details say how many cases `passed` of a `total`, and
            for the first one that failed its number (`case`), `input`, `expected`, what it `got`, and the `error`.
        Invalid: it does not compile.
        Timeout: loading it or a case took too long, and nothing failed before.
        InfraError: the sandbox failed.
    """
    settings = settings or CodeSettings()
    results: list[CaseResult] = []
    try:
        for result in _iter_results(code, tests, settings, new_sandbox):
            results.append(result)
            if not (result.passed or settings.partial_credit):
                break
    except DoesNotCompile as failure:
        return Invalid(f"the code does not compile: {failure}")
    except DoesNotLoad as failure:
        results.append(CaseResult(False, error=str(failure)))
    except DeadlineExceeded:
        results.append(CaseResult(False, late=True, error="it took too long to load"))
    except InfraError as failure:
        return failure
    return _grade(results, tests, settings)


def _iter_results(code: str, tests: CodeTests, settings: CodeSettings, new_sandbox: NewSandbox) -> Iterator[CaseResult]:
    """Yield the outcome of each case in order; they share a process for as long as it lives."""
    end = time.monotonic() + settings.total_seconds
    limits = Limits(
        wall_seconds=settings.total_seconds + 60, cpu_seconds=settings.total_seconds, memory_bytes=settings.memory_bytes
    )
    number, total = 0, _count(tests)
    while number < total:
        with SolutionProcess(tests, new_sandbox, limits) as answer:
            answer.load(code, number, min(time.monotonic() + settings.case_seconds, end))
            alive = True
            while alive and number < total:
                result = answer.judge(number, min(time.monotonic() + settings.case_seconds, end))
                yield result
                alive = not result.fatal
                number += 1


def _count(tests: CodeTests) -> int:
    return len(tests.tests if isinstance(tests, AssertTests) else tests.cases)


def _grade(results: list[CaseResult], tests: CodeTests, settings: CodeSettings) -> Grade:
    passed = sum(result.passed for result in results)
    details: dict[str, object] = {"passed": passed, "total": _count(tests)}
    failed = next(((number, result) for number, result in enumerate(results) if not result.passed), None)
    if failed is None:
        return Score(1.0, details=details)
    number, result = failed
    if result.late and not settings.partial_credit:
        return Timeout(settings.case_seconds, f"case {number} of {_count(tests)}")
    return Score(
        passed / _count(tests) if settings.partial_credit else 0.0,
        details=details | {"case": number} | _make_feedback(result, tests, number),
    )


def _make_feedback(result: CaseResult, tests: CodeTests, number: int) -> dict[str, str]:
    if isinstance(tests, AssertTests):
        about = {"expected": tests.tests[number]}
    else:
        about = {"input": tests.cases[number].input, "expected": tests.cases[number].output}
    about |= {"got": result.got or "", "error": result.error}
    return {name: text[:SHOWN] for name, text in about.items() if text}
