"""Mathematical answers, as published."""

from skyrl_agent.tasks.grading import extract_final_text, grade_math
from skyrl_agent.types import JsonObject
from skyrl_gym.graders import Score, reward_of

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: str, extra_info: object = None) -> JsonObject:
    r"""Return 1 if the last `\boxed{}` after the thoughts (else the whole text) is equivalent to the gold answer, else
    0.
    """
    grade = grade_math(extract_final_text(solution_str), str(ground_truth))
    reward = reward_of(grade)
    return {"score": reward, "acc": reward == 1.0, "pred": grade.prediction if isinstance(grade, Score) else None}
