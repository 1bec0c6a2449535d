"""tinker-cookbook's own recipes learn against a real server: loss falls, reward rises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
HERE = Path(__file__).parent / "cookbook"
MODEL, TEACHER = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3.6-35B-A3B"
SECONDS = 3600


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
def test_the_cookbooks_recipes_learn(sdk_python, start_server, tmp_path: Path):
    python = sdk_python("cookbook-0.6.1")
    playground = tmp_path / "playground"
    playground.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([python, HERE / "playground.py", playground], check=True, env=environment, timeout=900)
    server = start_server(playground / MODEL, served=[MODEL, TEACHER])
    command = [sys.executable, HERE / "recipes.py", "--python", python, "--playground", playground]
    command += ["--base-url", server.url, "--api-key", server.keys[0]]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
