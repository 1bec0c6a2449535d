"""Kit for tests that run commands in sandboxes. Needs pytest."""

import os
from functools import cache

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.backends import KIND_VARIABLE, Kind, make_sandbox
from skyrl_gym.sandbox.container_engine import EngineName
from skyrl_gym.sandbox.machine_image import ensure_machine_image

MACHINE_IMAGE = "localhost/skyrl-machine:2"
"""The tag counts changes of its content: an image that is there is not made again."""


def require_sandbox(kind: Kind = "auto") -> None:
    """Skip the test where commands cannot be isolated. Runs a command, as an installed program proves nothing: user
    namespaces may be forbidden, and a Docker client may have no daemon. Tried once per process."""
    if kind == "auto" and os.environ.get(KIND_VARIABLE) == "process":
        pytest.skip(f"{KIND_VARIABLE}=process has limits but no isolation")
    try:
        make_sandbox(kind)
    except InfraError as error:
        pytest.skip(f"no {kind} sandbox works here: {error}")


@pytest.fixture
def needs_sandbox() -> None:
    """Skip the test where untrusted code cannot be run."""
    require_sandbox()


@pytest.fixture
def needs_local() -> None:
    """Skip the test where bubblewrap does not work."""
    require_sandbox("local")


@cache
def needed_image(engine: EngineName) -> str:
    """Return the name of an image of this machine's usual programs, made at the first need. Skips the test, with the
    engine's words, where no container of it can be started."""
    try:
        ensure_machine_image(engine, MACHINE_IMAGE)
    except InfraError as error:
        pytest.skip(f"{engine} does not work here: {error}")
    return MACHINE_IMAGE
