"""The mark of tests that run code in a sandbox."""

import os
import shutil

import pytest

NO_SANDBOX = not (shutil.which("bwrap") or shutil.which("docker") or os.environ.get("SKYRL_GYM_SANDBOX"))


def sandboxed(test):
    """Slow, as it starts processes, and skipped on a machine without a sandbox."""
    return pytest.mark.slow(pytest.mark.skipif(NO_SANDBOX, reason="needs bubblewrap or Docker")(test))
