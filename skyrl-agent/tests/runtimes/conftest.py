"""Runtimes of each kind, a real server on the loopback, and a look at what is left of them."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from skyrl_agent.runtimes import Runtime, RuntimeSpec, make_runtime
from skyrl_agent.runtimes.leases import FOLDER_VARIABLE
from skyrl_gym.sandbox.container_engine import EngineName
from skyrl_gym.sandbox.testing import needed_image

from .runtime_places import LIMITS, serving, wait_until_true

MakeRuntime = Callable[..., Runtime]


@pytest.fixture(scope="session")
def lease_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests here: the process that watches this one is told of it once."""
    return tmp_path_factory.mktemp("leases")


@pytest.fixture(autouse=True)
def check_no_leftovers(lease_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither leases nor folders, after each test."""
    places = tmp_path / "places"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    monkeypatch.setenv(FOLDER_VARIABLE, str(lease_folder))
    yield
    assert wait_until_true(lambda: not [*os.listdir(places), *os.listdir(lease_folder)]), (
        os.listdir(places),
        os.listdir(lease_folder),
    )


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with serving() as url:
        yield url


ENGINES = get_args(EngineName)


@pytest.fixture(
    params=["local", "process", "remote", *(pytest.param(engine, marks=pytest.mark.full) for engine in ENGINES)]
)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeRuntime:
    """`make(files=..., ...)`: a runtime of each kind, not started."""
    settings: dict[str, Any] = {"kind": request.param, "limits": LIMITS}
    if request.param in ENGINES:
        settings["image"] = needed_image(request.param)
    else:
        request.getfixturevalue("needs_local")
    if request.param == "process":  # for trusted code: no kind of ours, but a choice of the gym's
        monkeypatch.setenv("SKYRL_GYM_SANDBOX", "process")
        settings["kind"] = "auto"
    if request.param == "remote":
        settings["url"] = request.getfixturevalue("server")
    return lambda **given: make_runtime(RuntimeSpec(**{**settings, **given}))
