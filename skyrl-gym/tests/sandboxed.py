"""The mark of tests that run code in a sandbox."""

import os
import shutil

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import backends

NO_SANDBOX = not (shutil.which("bwrap") or shutil.which("docker") or os.environ.get("SKYRL_GYM_SANDBOX"))


def sandboxed(test):
    """Slow, as it starts processes, and skipped on a machine without a sandbox."""
    return pytest.mark.slow(pytest.mark.skipif(NO_SANDBOX, reason="needs bubblewrap or Docker")(test))


def without_sandbox(monkeypatch):
    """From here on this is a machine where code should run in Docker, and Docker does not run."""
    monkeypatch.setenv(backends.KIND_VARIABLE, "docker")
    monkeypatch.setitem(backends._found, "docker", InfraError("Docker does not run"))
