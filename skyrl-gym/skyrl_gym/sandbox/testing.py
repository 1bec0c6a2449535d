"""Kit for tests that start containers. Needs pytest."""

from functools import cache

import pytest

from skyrl_gym.error import InfraError
from skyrl_gym.sandbox.container_engine import EngineName
from skyrl_gym.sandbox.machine_image import ensure_machine_image

MACHINE_IMAGE = "localhost/skyrl-machine:2"
"""The tag counts changes of its content: an image that is there is not made again."""


@cache
def needed_image(engine: EngineName) -> str:
    """Return the name of an image of this machine's usual programs, made at the first need. Skips the test, with the
    engine's words, where no container of it can be started."""
    try:
        ensure_machine_image(engine, MACHINE_IMAGE)
    except InfraError as error:
        pytest.skip(f"{engine} does not work here: {error}")
    return MACHINE_IMAGE
