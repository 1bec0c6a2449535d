"""A real server process on a free loopback port, with two tenants' keys."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from sdk_environment import sdk_environment
from tx_server import ServerProcess


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: str
    keys: tuple[str, str]
    log: Path


Start = Callable[..., RunningServer]
"""(folder of the base model, options..., served=names) -> a server that runs until the tests of the file end"""


@pytest.fixture(scope="module")
def running_server(tiny_model: Path, start_server: Start) -> RunningServer:
    return start_server(tiny_model, served=["tiny"])


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with ExitStack() as running:

        def start(base_model: Path, *more: str, served: list[str]) -> RunningServer:
            names = [part for name in served for part in ("--served-model-name", name)]
            folder, tenants = tmp_path_factory.mktemp("server"), ("first", "second")
            options = ["--base-model", str(base_model), *names, *more, "--no-standby-engine"]
            server = ServerProcess(folder, *options, tenants=tenants)
            running.enter_context(server)
            return RunningServer(server.url, served[0], (server.key("first"), server.key("second")), server.log)

        yield start


@pytest.fixture(scope="session")
def sdk_python() -> Callable[[str], Path]:
    return sdk_environment
