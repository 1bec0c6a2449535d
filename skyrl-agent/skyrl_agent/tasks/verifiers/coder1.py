"""Programs, as published: always in a sandbox."""

from skyrl_agent.tasks.grading import final_text, grade_code, tests_of
from skyrl_gym.graders import reward_of

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: object, extra_info: object = None) -> dict[str, float]:
    """Return 1 if the last fenced program after the thoughts passes all tests, else 0. Tests: see `tests_of`."""
    return {"score": reward_of(grade_code(final_text(solution_str), tests_of(ground_truth)))}
