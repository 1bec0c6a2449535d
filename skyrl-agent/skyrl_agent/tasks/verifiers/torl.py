"""Mathematical answers under another published name."""

from skyrl_agent.tasks.verifiers.naive_dapo import compute_score

__all__ = ["compute_score"]
