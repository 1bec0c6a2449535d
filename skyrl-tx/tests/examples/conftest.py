"""A real server of the examples' tiny model, and an environment with the SDK."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sdk_environment import sdk_environment
from tx_server import ServerProcess

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples" / "tinker"
SDK_VERSION = "0.38.0"
WARM_UP_SECONDS = 900


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("examples")
    command = [sys.executable, EXAMPLES / "tiny_model.py", folder / "tiny"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, timeout=WARM_UP_SECONDS)
    with ServerProcess(folder, "--base-model", str(folder / "tiny"), "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture(scope="session")
def sdk_python() -> Path:
    return sdk_environment(SDK_VERSION)
