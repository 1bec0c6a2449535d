"""Fixtures shared by the tests."""

import os
from pathlib import Path

import hypothesis
import pytest

from skyrl_gym.sandbox.testing import needs_local, needs_sandbox  # noqa: F401 (fixtures)

# Elsewhere each run tries other cases; there a change should be judged by the same ones every time.
hypothesis.settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("repeatable")

DEFAULT_TEST_DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real public data; without it the test is skipped."""
    folder = Path(os.environ.get("SKYRL_TEST_DATA", DEFAULT_TEST_DATA))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set SKYRL_TEST_DATA")
    return folder
