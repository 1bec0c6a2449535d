"""Public names of the SQL grader; the code is in `skyrl_gym.graders.sql`."""

from skyrl_gym.graders.sql import compute_score_single, verify_format_and_extract

__all__ = ["compute_score_single", "verify_format_and_extract"]
