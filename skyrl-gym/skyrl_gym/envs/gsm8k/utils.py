"""The names under which GSM8K's grading is known. It is done in `skyrl_gym.graders.math`."""

from typing import Literal

from skyrl_gym.graders.math import extract_number


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the final answer of a solution, without thousands separators, or None; see `extract_number`.

    Raises:
        ValueError: the method is neither `strict` (the number after the first `#### `) nor `flexible` (the last one).
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"method must be strict or flexible; got {method!r}")
    return extract_number(solution_str, strict=method == "strict")


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` if the answer equals the ground truth exactly, `format_score` for a different answer, 0 without
    one.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
