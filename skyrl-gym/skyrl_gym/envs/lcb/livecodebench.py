"""The name under which LiveCodeBench's grading is known. It is done in `skyrl_gym.graders.code`."""

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_gym.graders.code import CodeSettings, grade_code, parse_tests
from skyrl_gym.graders.results import reward_of


def lcb_check_correctness(
    sample: Sequence[Mapping[str, Any]], generation: str, timeout: float = 6, debug: bool = False
) -> bool:
    """Whether a program passes every test of a sample; `debug` prints why not.

    Raises:
        TaskError: there is no test, or one is malformed.
        InfraError: the sandbox failed.
    """
    tests = parse_tests(list(sample))
    settings = CodeSettings(case_seconds=timeout, total_seconds=(timeout + 1) * len(sample) + 5)
    grade = grade_code(generation, tests, settings)
    if debug:
        print(grade)
    return reward_of(grade) == 1.0
