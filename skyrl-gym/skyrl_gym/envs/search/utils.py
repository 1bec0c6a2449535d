"""Public names of the search environment's grading; the code is in `skyrl_gym.graders.qa`."""

from skyrl_gym.graders.qa import (
    compute_score,
    compute_score_subem,
    em_check,
    extract_solution,
    normalize_answer,
    subem_check,
)

__all__ = [
    "compute_score",
    "compute_score_subem",
    "em_check",
    "extract_solution",
    "normalize_answer",
    "subem_check",
]
