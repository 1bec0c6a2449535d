"""Fixtures shared by the tests."""

import os
from pathlib import Path

import hypothesis
import pytest

from skyrl_gym.sandbox.testing import needs_local, needs_sandbox  # noqa: F401 (fixtures)

# No deadline: a loaded machine is slow. In CI each run tries the same cases, which judge a change alike.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("tests")

DEFAULT_TEST_DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real public data; without it the test is skipped."""
    folder = Path(os.environ.get("SKYRL_TEST_DATA", DEFAULT_TEST_DATA))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set SKYRL_TEST_DATA")
    return folder
