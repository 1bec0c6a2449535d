"""The sandboxes of this machine, and what of the host must be as before when one is closed."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox import Limits, Sandbox, make_sandbox

TEST_LIMITS = Limits(wall_seconds=20.0)


def no_docker() -> str:
    """Return the reason why containers cannot be tested here; empty if they can."""
    if shutil.which("docker") is None:
        return "the docker command is not installed"
    answer = subprocess.run(["docker", "info"], capture_output=True, timeout=30, check=False)
    return "" if answer.returncode == 0 else "no Docker daemon answers"


CONTAINERS = [] if no_docker() else ["docker"]


def backend(kind: str) -> Sandbox:
    try:
        return make_sandbox(kind, limits=TEST_LIMITS)  # pyright: ignore[reportArgumentType]
    except InfraError as error:
        pytest.skip(f"no {kind} sandbox here: {error}")


@pytest.fixture(params=["local", "process", *CONTAINERS])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Each kind, as far as it does what the protocol says."""
    with backend(request.param) as started:
        yield started


@pytest.fixture(params=["local", *CONTAINERS])
def walled(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Each kind that contains hostile code."""
    with backend(request.param) as started:
        yield started


@pytest.fixture
def needs_local() -> None:
    backend("local")
