"""Worked examples in the docstrings of requests and completions."""

import doctest

from skyrl_train.inference_engines import request


def test_docstring_examples_hold() -> None:
    outcome = doctest.testmod(request)
    assert outcome.attempted >= 4 and outcome.failed == 0
