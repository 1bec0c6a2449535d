"""Where the grader of SQL was; it is in `skyrl_gym.graders.sql`."""

from skyrl_gym.graders.sql import compute_score_single, verify_format_and_extract

__all__ = ["compute_score_single", "verify_format_and_extract"]
