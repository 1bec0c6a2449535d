"""The local sandbox for somebody who is not root: the same tests, by another user's Python."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import skyrl_gym
from skyrl_gym.sandbox.testing import require_sandbox

NOBODY = 65534


DEPENDS_ON_USER = """contained and (bomb or processes or threads or memory or namespaces or mounts or folder or daemon
    or secrets or trace or limits or name or environments or kernel or roots) and not docker and not podman"""


@pytest.mark.parametrize(
    "tests",
    [
        pytest.param(DEPENDS_ON_USER, marks=pytest.mark.slow, id="those that depend on the user"),
        pytest.param("not process] and not docker and not podman", marks=pytest.mark.full, id="all"),
    ],
)
def test_sandbox_tests_pass_for_unprivileged_user(tests):
    if os.geteuid() != 0:
        pytest.skip("we are not root: the other tests are this one")
    require_sandbox("local")
    python = unprivileged_python()
    here = Path(__file__).parent
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(here.parents[1]), "--import-mode=importlib"]
    files = [str(here / name) for name in ("test_conformance.py", "test_hostile.py", "test_many.py")]
    ended = run_as_nobody([python, "-m", "pytest", *options, "-W", "error", "-k", " ".join(tests.split()), *files])
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout.splitlines()[-1]


def unprivileged_python() -> str:
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        if shutil.which(python) and run_as_nobody([python, "-c", "import pytest, skyrl_gym"]).returncode == 0:
            return python
    pytest.skip("another user can run no Python of this version here, or not read this package")


def run_as_nobody(command: list[str]) -> "subprocess.CompletedProcess[str]":
    folders = [str(Path(skyrl_gym.__file__).parents[1]), str(Path(pytest.__file__).parents[1])]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(folders), "HOME": "/nonexistent"}
    try:
        return subprocess.run(
            command,
            env={**env, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd="/",
            capture_output=True,
            text=True,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            timeout=280,
            check=False,
        )
    except PermissionError as error:
        return subprocess.CompletedProcess(command, 126, "", str(error))
