"""A bench on which settings are tried."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train_testing.tiny_runs import register_environments

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add this folder


@pytest.fixture(scope="module")
def bench(group_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Bench"]:  # noqa: F821
    from effects import ENVIRONMENTS, Bench

    with register_environments(**ENVIRONMENTS):
        yield Bench(tmp_path_factory.mktemp("bench"))
