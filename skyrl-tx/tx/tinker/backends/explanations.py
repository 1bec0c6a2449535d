"""Explanations of hangs, which the trainer's package makes of the waits that both processes record."""

from skyrl_train.utils.explanations import write_explanation

__all__ = ["write_explanation"]
