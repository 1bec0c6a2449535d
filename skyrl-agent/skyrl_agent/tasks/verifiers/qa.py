"""Short answers, as published: the text, or what it holds in a box or `<answer>` tags, against accepted answers."""

from skyrl_agent.tasks.grading import grade_em, grade_f1
from skyrl_agent.tasks.rows import golds_of
from skyrl_agent.types import Row
from skyrl_gym.graders import reward_of

__all__ = ["compute_score_em", "compute_score_f1"]


def compute_score_em(solution_str: str, ground_truth: Row) -> dict[str, float]:
    """Return 1 if the answer is one of `ground_truth["target"]` after normalization, else 0."""
    return {"score": reward_of(grade_em(solution_str, golds_of(ground_truth, "target")))}


def compute_score_f1(solution_str: str, ground_truth: Row) -> dict[str, float]:
    """Return the best word-level F1."""
    return {"score": reward_of(grade_f1(solution_str, golds_of(ground_truth, "target")))}
