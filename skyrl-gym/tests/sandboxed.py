"""The mark of tests that run code in a sandbox, and the processes that are there."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import backends

RUNS_CODE = frozenset({"code", "lcb", "rlm", "searchcode"})
"""Environments that run what a model writes."""
sandboxed = pytest.mark.usefixtures("needs_sandbox")
"""Some programs of these tests kill every process they can reach."""


def without_sandbox(monkeypatch):
    """Simulate a machine on which code should run in Docker, and Docker does not run."""
    monkeypatch.setenv(backends.KIND_VARIABLE, "docker")
    monkeypatch.setitem(backends._found, ("docker", None, "missing"), InfraError("Docker does not run"))


def processes_with(text: str, file: str = "cmdline") -> list[int]:
    """The other processes whose file of this name under /proc holds this text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            with suppress(OSError):  # it ended meanwhile
                if text.encode() in (folder / file).read_bytes():
                    found.append(int(folder.name))
    return found
