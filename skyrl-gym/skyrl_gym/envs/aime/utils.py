"""The names under which the grading of AIME answers is known. It is done in `skyrl_gym.graders.math`."""

from collections.abc import Sequence
from typing import Any

from skyrl_gym.graders.math import (
    grade_minerva,
    grade_strict_box,
    last_boxed_only_string,
    normalize_final_answer,
    remove_boxed,
)
from skyrl_gym.graders.math_minerva import ANSWER_PATTERN

__all__ = [
    "compute_score",
    "is_correct_minerva",
    "is_correct_strict_box",
    "last_boxed_only_string",
    "normalize_final_answer",
    "remove_boxed",
    "verify",
]

MAX_CHARACTERS = 300
"""Number of characters at the end of a solution that are searched for the answer."""


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> dict[str, Any]:
    """`score` 1.0 or -1.0, `acc` whether it is right, `pred` the answer that was found."""
    correct, pred = verify(solution_str[-MAX_CHARACTERS:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: Sequence[int] | None = None,
) -> tuple[bool, str | None]:
    """Grade a solution by its last box or by its last `Answer: ...`. Returns: correctness and the extracted answer."""
    if strict_box_verify:
        score, boxed = is_correct_strict_box(solution_str, answer, pause_tokens_index)
        return score == 1, boxed
    return is_correct_minerva(solution_str, answer)


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_PATTERN
) -> tuple[bool, str]:
    """Compare the last `Answer: ...` after normalisation. Returns: correctness and the answer ("[INVALID]" if none)."""
    score = grade_minerva(solution_str, gt, gold_is_boxed=gt_need_extract, answer_pattern=answer_pattern)
    return bool(score.value), score.prediction or ""


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: Sequence[int] | None = None
) -> tuple[int, str | None]:
    """1 or -1 for the last box of the last 100 characters (before the last pause index, if given), and its content."""
    score = grade_strict_box(pred, gt, end=pause_tokens_index[-1] if pause_tokens_index else None)
    return (1 if score.value else -1), score.prediction
