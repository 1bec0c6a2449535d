"""tinker-cookbook's own recipes learn against a real server: loss falls, reward rises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
HERE = Path(__file__).parent / "cookbook"
MODEL, TEACHER = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3.6-35B-A3B"
SERVED = [MODEL, TEACHER, "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3-8B"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
SECONDS = 3600


@pytest.fixture(scope="module")
def python(sdk_python) -> Path:
    return sdk_python("cookbook-0.6.1")


@pytest.fixture(scope="module")
def playground(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cookbook") / "playground"
    folder.mkdir()
    subprocess.run([python, HERE / "playground.py", folder], check=True, env=ENVIRONMENT, timeout=900)
    return folder


@pytest.fixture(scope="module")
def server(start_server, playground: Path):
    return start_server(playground / MODEL, "--stable-reinforce-as", "importance_sampling", served=SERVED)


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
def test_cookbook_recipes_learn(python: Path, playground: Path, server):
    command = [sys.executable, HERE / "recipes.py", "--python", python, "--playground", playground]
    command += ["--base-url", server.url, "--api-key", server.keys[0]]
    run = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.full
@pytest.mark.timeout(SECONDS)
def test_recipe_programs_end_as_expected(python: Path, playground: Path, server):
    environment = ENVIRONMENT | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.keys[0]}
    command = [python, HERE / "every_recipe.py", playground]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
