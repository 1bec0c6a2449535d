"""Explanations of hangs, which the trainer's package makes of the waits that both processes record."""

from skyrl_train.utils.explanations import explain_expiry

__all__ = ["explain_expiry"]
