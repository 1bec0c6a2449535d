"""Worked examples in the docstrings of the data that flows through a run."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("module", "attempts"),
    [
        ("inference_engines.request", 4),
        ("rollouts.types", 6),
        ("rollouts.groups", 5),
        ("rollouts.journal", 10),
        ("training_batch", 3),
        ("weight_sync.base", 7),
        ("weight_sync.payload", 2),
    ],
)
def test_docstring_examples_hold(module: str, attempts: int):
    outcome = doctest.testmod(import_module(f"skyrl_train.{module}"))
    assert outcome.attempted >= attempts and outcome.failed == 0
