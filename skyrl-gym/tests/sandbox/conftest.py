"""The sandboxes of this machine, and what of the host must be as before when one is closed."""

import shutil
from collections.abc import Iterator
from typing import get_args

import pytest

from skyrl_gym.sandbox import Limits, Sandbox, make_sandbox
from skyrl_gym.sandbox.backends import Kind
from skyrl_gym.sandbox.container_engine import EngineName
from skyrl_gym.sandbox.testing import needed_image, require_sandbox

TEST_LIMITS = Limits(wall_seconds=20.0)


CONTAINERS = [pytest.param(engine, marks=pytest.mark.full) for engine in get_args(EngineName) if shutil.which(engine)]
"""Container engines whose command is here. A container takes a second or more for each command."""


def backend(kind: Kind) -> Sandbox:
    if kind == "docker" or kind == "podman":
        return make_sandbox(kind, limits=TEST_LIMITS, image=needed_image(kind))
    require_sandbox(kind)
    return make_sandbox(kind, limits=TEST_LIMITS)


@pytest.fixture(params=["local", "process", *CONTAINERS])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Each kind, as far as it does what the protocol says."""
    with backend(request.param) as started:
        yield started


@pytest.fixture(params=["local", *CONTAINERS])
def walled_kind(request: pytest.FixtureRequest) -> Kind:
    """Each kind that contains hostile code."""
    return request.param


@pytest.fixture
def walled(walled_kind: Kind) -> Iterator[Sandbox]:
    """A sandbox of each of them."""
    with backend(walled_kind) as started:
        yield started
