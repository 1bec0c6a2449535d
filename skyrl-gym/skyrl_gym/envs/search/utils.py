"""Where the search environment's grading used to be; its home is `skyrl_gym.graders.qa`."""

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
