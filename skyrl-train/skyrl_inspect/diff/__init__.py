"""Comparison of two runs from their folders alone: what they are made of, where they part, and why."""

from skyrl_inspect.diff.comparison import RunComparison, compare_runs

__all__ = ["RunComparison", "compare_runs"]
