"""Programs, as published: always in a sandbox."""

from skyrl_agent.tasks.grading import extract_final_text, grade_code, parse_tests_of
from skyrl_gym.graders import reward_of

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: object, extra_info: object = None) -> dict[str, float]:
    """Return 1 if the last fenced program after the thoughts passes all tests, else 0. Tests: see `parse_tests_of`."""
    return {"score": reward_of(grade_code(extract_final_text(solution_str), parse_tests_of(ground_truth)))}
