"""Graders of `skyrl_gym` for final responses of agents.

A finish tool takes plain answers, so without a box, a tag or a fence the whole text is the answer.
"""

import json
from collections.abc import Callable, Mapping

from skyrl_agent.errors import TaskRowError
from skyrl_agent.runtimes.threads import run_in_thread
from skyrl_agent.types import Row
from skyrl_gym.error import TaskError
from skyrl_gym.graders import Grade, code, math, qa

GRADE_SECONDS = 1800.0
"""The graders have shorter limits of their own; this one is for a machine that stands still."""


async def run_grader(grader: Callable[..., Grade], *arguments: object) -> Grade:
    """Run a grader in a separate thread, as it may wait for a judge, a process or a sandbox.

    Raises:
        InfraError: it did not return.
    """
    return await run_in_thread(GRADE_SECONDS, grader, *arguments)


def extract_final_text(result: object) -> str:
    """Return an agent's result without thoughts; "" without a result."""
    return "" if result is None else str(result).rpartition("</think>")[2].strip()


def extract_short_answer(text: str) -> str:
    r"""Return the last `\boxed{}`, else the last `<answer>`, else the whole text."""
    boxed = extract_boxed_answer(text)
    return (boxed if boxed is not None else qa.extract_solution(text) or text).strip()


def extract_boxed_answer(text: str) -> str | None:
    """Return the contents of the last `\\boxed{}`; None without one."""
    boxed = math.last_boxed_only_string(text)
    return math.remove_boxed(boxed) if boxed is not None else None


def grade_math(text: str, gold: str, question: str = "") -> Grade:
    """Return 1 if the answer is equivalent to the gold answer (`skyrl_gym.graders.math.grade_equivalence`)."""
    return math.grade_equivalence(extract_short_answer(text), gold, question=question)


def grade_em(text: str, golds: list[str]) -> Grade:
    """Grade by exact match with one of the gold answers."""
    return qa.exact_match(extract_short_answer(text), golds)


def grade_f1(text: str, golds: list[str]) -> Grade:
    """Grade by the F1 score of words."""
    return qa.f1(extract_short_answer(text), golds)


def grade_code(text: str, tests: code.CodeTests) -> Grade:
    """Return 1 if the last fenced program of the text (or the whole text) passes all tests in a sandbox."""
    program = code.extract_code(text)
    return code.grade_code(text if program is None else program, tests)


def parse_tests_of(ground_truth: object) -> code.CodeTests:
    """Return the tests of a row: the formats of `skyrl_gym.graders.code.parse_tests`, and `{"inputs": [...], "outputs":
    [...], "fn_name": ...}` and `{"functional": "assertions"}`.

    Raises:
        TaskRowError: they cannot be read.
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError as failure:
            raise TaskRowError(f"ground_truth must be JSON: {failure}; got {ground_truth!r:.200}") from failure
    try:
        return code.parse_tests(_convert_tests(ground_truth) if isinstance(ground_truth, Mapping) else ground_truth)
    except TaskError as failure:
        raise TaskRowError(str(failure)) from failure


def _convert_tests(row: Row) -> Row:
    if "functional" in row:
        return {"tests": [row["functional"]]}
    if "inputs" not in row or "outputs" not in row:
        return row
    name = row.get("fn_name")
    kind = {"testtype": "functional", "metadata": {"func_name": name}} if name else {"testtype": "stdin"}
    if len(row["inputs"]) != len(row["outputs"]):
        raise TaskRowError(f"found {len(row['inputs'])} inputs and {len(row['outputs'])} outputs")
    pairs = zip(row["inputs"], row["outputs"], strict=True)
    return {"tests": [{"input": _to_text(given), "output": _to_text(wanted), **kind} for given, wanted in pairs]}


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
