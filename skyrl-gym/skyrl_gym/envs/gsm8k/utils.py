"""Grading of grade-school mathematics (GSM8K, https://arxiv.org/abs/2110.14168): the number after `#### `."""

import re
from typing import Literal

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The final answer of a solution, without thousands separators, or None.

    `strict`: the number after the first `#### `. `flexible`: the last number anywhere. A full stop that follows
    the number belongs to it, so "#### 42." is not "42".
    """
    if method == "strict":
        found = _STRICT.search(solution_str)
        return found.group(1).replace(",", "") if found else None
    if method == "flexible":
        numbers = [run for run in _NUMBER.findall(solution_str) if run.strip("-,") not in ("", ".")]
        return numbers[-1].replace(",", "") if numbers else None
    raise ValueError(f"method must be strict or flexible; got {method!r}")


def compute_score(
    solution_str: str,
    ground_truth: str,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if the answer reads exactly as the ground truth, `format_score` if there is another one, else 0."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
