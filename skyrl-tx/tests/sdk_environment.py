"""Environments of their own for versions of the `tinker` SDK."""

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALL_SECONDS = 600


def sdk_environment(version: str) -> Path:
    """The Python of an environment that has this version, made when it is not there; skips the test if it cannot be."""
    folder = Path(os.environ.get("TX_SDK_ENVS") or Path.home() / ".cache" / "skyrl-tx" / "sdk")
    command = [REPOSITORY / "scripts" / "sdk_envs.sh", folder, version]
    made = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, cwd=REPOSITORY)
    if made.returncode:
        pytest.skip(f"{version} could not be installed: {made.stderr[-500:]}")
    return folder / version / "bin" / "python"
