"""A run as a page to look at and a picture to show, from its folder alone."""

from skyrl_train.report.learning_curve import save_learning_curve_png
from skyrl_train.report.page import write_report

__all__ = ["save_learning_curve_png", "write_report"]
