"""Commands as the documentation starts them: `uv run -m …`, from the root and from a package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def uv() -> list[str]:
    """uv on PATH, or installed next to the interpreter of the virtual environment."""
    base = Path(sys.base_prefix) / "bin" / "python3"
    for command in (["uv"], [str(base), "-m", "uv"]):
        if shutil.which(command[0]) and subprocess.run([*command, "--version"], capture_output=True).returncode == 0:
            return command
    pytest.skip("uv is not installed: pip install uv")


@pytest.mark.first_case
@pytest.mark.process
@pytest.mark.parametrize(
    ("folder", "command"),
    [
        ("", ["skyrl_train.config.document"]),  # it starts in a tenth of the time
        ("skyrl-train", ["skyrl_train.entrypoints.main_base", "--help"]),
    ],
    ids=["root", "package"],
)
def test_uv_run_starts_entry_point(uv: list[str], folder: str, command: list[str], tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environment["UV_CACHE_DIR"] = str(tmp_path)  # HOME may be read-only
    command = [*uv, "run", "--no-sync", "-m", *command]
    done = subprocess.run(command, cwd=ROOT / folder, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "generator" in done.stdout


def test_example_script_uses_active_environment(tmp_path: Path):
    """`uv run` and an activated environment set VIRTUAL_ENV."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    done = subprocess.run(
        ["bash", str(ROOT / "examples/gsm8k/run_generation_gsm8k.sh")],
        env=environment | {"VIRTUAL_ENV": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.startswith("-m skyrl_train.entrypoints.main_generate")
