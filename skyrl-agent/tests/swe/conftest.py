"""What tests of software tasks share."""

import os
from pathlib import Path

import pytest

DEFAULT_TEST_DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real public data; without it the test is skipped."""
    folder = Path(os.environ.get("SKYRL_TEST_DATA", DEFAULT_TEST_DATA))
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set SKYRL_TEST_DATA")
    return folder
