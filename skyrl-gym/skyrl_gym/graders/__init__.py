"""Graders: pure functions that judge an answer. `math`, `qa`, `code`, `sql`; their results are in `results`."""

from skyrl_gym.graders.results import Grade, InfraError, Invalid, Score, Timeout, reward_of

__all__ = ["Grade", "InfraError", "Invalid", "Score", "Timeout", "reward_of"]
