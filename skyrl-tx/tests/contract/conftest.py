"""A real server process on a free loopback port, with two tenants' keys."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tx_server import ServerProcess

REPOSITORY = Path(__file__).parents[3]
INSTALL_SECONDS = 600


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: str
    keys: tuple[str, str]
    log: Path


Start = Callable[..., RunningServer]
"""(folder of the base model, served=names) -> a server that runs until the session of tests ends"""


@pytest.fixture(scope="session")
def running_server(tiny_model: Path, start_server: Start) -> RunningServer:
    return start_server(tiny_model, served=["tiny"])


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with ExitStack() as running:

        def start(base_model: Path, served: list[str]) -> RunningServer:
            names = [part for name in served for part in ("--served-model-name", name)]
            folder, tenants = tmp_path_factory.mktemp("server"), ("first", "second")
            server = ServerProcess(folder, "--base-model", str(base_model), *names, tenants=tenants)
            running.enter_context(server)
            return RunningServer(server.url, served[0], (server.key("first"), server.key("second")), server.log)

        yield start


@pytest.fixture(scope="session")
def sdk_python() -> Callable[[str], Path]:
    """A version of the SDK -> the Python of an environment that has it, made when it is not there."""
    folder = Path(os.environ.get("TX_SDK_ENVS") or Path.home() / ".cache" / "skyrl-tx" / "sdk")

    def python(version: str) -> Path:
        made = subprocess.run(
            [REPOSITORY / "scripts" / "sdk_envs.sh", folder, version],
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            cwd=REPOSITORY,
        )
        if made.returncode:
            pytest.skip(f"{version} could not be installed: {made.stderr[-500:]}")
        return folder / version / "bin" / "python"

    return python
