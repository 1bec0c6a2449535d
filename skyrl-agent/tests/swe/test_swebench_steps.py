"""The steps of SWE-bench tasks on a small repository made on the spot: everything but the image."""

import os
import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, get_args

import pytest

from skyrl_agent.errors import InfraError, TaskRowError
from skyrl_agent.runtimes.base import RuntimeSpec
from skyrl_agent.tasks.swebench import SWEBenchTask, harness
from skyrl_gym.sandbox.container_engine import EngineName, check_engine
from skyrl_gym.sandbox.machine_image import make_machine_image

WRONG = "def double(n):\n    return n\n"
FIX = "sed -i 's/return n/return 2 * n/' double.py"
TESTS = """from double import double

def test_zero():
    assert double(0) == 0

def test_two():
    assert double(2) == 4
"""
TEST_PATCH = """diff --git a/test_double.py b/test_double.py
--- a/test_double.py
+++ b/test_double.py
@@ -2,3 +2,6 @@
 
 def test_zero():
     assert double(0) == 0
+
+def test_two():
+    assert double(2) == 4
"""
OLD_TESTS = TESTS[: TESTS.index("\ndef test_two")]
REPOSITORY = """
git config --global user.email a@b; git config --global user.name a
git init -q; git add -A; git commit -qm first; git remote add origin nowhere
echo "# left over" >> double.py
"""
ROW = {
    "instance_id": "me__double-1",
    "problem_statement": "double(n) should be twice n",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": '["test_double.py::test_two"]',
    "PASS_TO_PASS": ["test_double.py::test_zero"],
}
R2E_ROW = {
    "problem_statement": "double(n) should be twice n",
    "data_source": "r2e-gym",
    "expected_output_json": '{"test_zero": "PASSED", "test_two": "PASSED"}',
}


class LocalTask(SWEBenchTask):
    """Task with a repository made in a local sandbox in place of an image."""

    files: ClassVar = {"double.py": WRONG, "test_double.py": OLD_TESTS, "logo.bin": "\0\1"}
    setup: ClassVar = (REPOSITORY,)

    def runtime_spec(self, instance):
        limits = replace(self.limits, memory_bytes=1 << 30)
        return RuntimeSpec(kind="local", files=self.files, setup=self.setup, limits=limits)

    evaluation_runtime_spec = runtime_spec


class LocalR2E(LocalTask):
    files: ClassVar = {
        "double.py": WRONG,
        "r2e_tests/test_double.py": TESTS,
        "run_tests.sh": "cp r2e_tests/test_double.py test_it.py; python -m pytest -rA test_it.py",
    }


class LocalSmith(LocalTask):
    files: ClassVar = {"double.py": WRONG, "test_double.py": TESTS}
    setup: ClassVar = (
        "git config --global user.email a@b; git config --global user.name a; git init -q; git add -A; "
        "git commit -qm bug; git checkout -q -b me__double-1; rm test_double.py; git commit -qam 'tests taken away'; "
        "git checkout -q master || git checkout -q main",
    )


ENVIRONMENT = "/opt/miniconda3/envs/testbed"
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")


def make_swebench_image(engine: EngineName, folder: Path) -> str:
    """Make an image in the layout of SWE-bench's: the repository, and an environment with an interpreter of its own."""
    repository, environment = folder / "testbed", folder / "environment"
    (environment / "bin").mkdir(parents=True)
    python = environment / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={ENVIRONMENT}/lib exec /usr/bin/python3 "$@"\n')
    python.chmod(0o755)
    for name in PACKAGES:
        shutil.copytree(Path(find_spec(name).origin).parent, environment / "lib" / name)  # pyright: ignore
        for metadata in Path(find_spec(name).origin).parents[1].glob(f"{name}-*.dist-info"):  # pyright: ignore
            shutil.copytree(metadata, environment / "lib" / metadata.name)
    shutil.copy(find_spec("py").origin, environment / "lib")  # pyright: ignore
    repository.mkdir()
    for name, text in {"double.py": WRONG, "test_double.py": OLD_TESTS}.items():
        (repository / name).write_text(text)
    subprocess.run(["bash", "-c", REPOSITORY], cwd=repository, env=os.environ | {"HOME": str(folder)}, check=True)
    folders = {"/testbed": repository, ENVIRONMENT: environment}
    make_machine_image(engine, "localhost/skyrl-swebench", ["git", "patch"], folders)
    return "localhost/skyrl-swebench"


@pytest.mark.full
@pytest.mark.parametrize("engine", get_args(EngineName))
async def test_agent_works_in_swebench_image_layout(engine, play, tmp_path):
    try:
        check_engine(engine)
    except InfraError as error:
        pytest.skip(f"{engine} does not work here: {error}")
    image = make_swebench_image(engine, tmp_path)

    class ImageTask(SWEBenchTask):
        def runtime_spec(self, instance):
            return replace(super().runtime_spec(instance), kind=engine, image=image, pull="never")

        evaluation_runtime_spec = runtime_spec

    row = ROW | {"data_source": "swe-bench", "repo": "me/double"}
    result, judgement = await play(ImageTask(), row, f"[ $(pwd) = /testbed ] && {FIX}; touch /etc/changed")
    assert (judgement.reward, judgement.parts["pass_to_pass"]) == (1.0, 1.0)
    assert result["git_patch"].startswith("diff --git a/double.py b/double.py")
    assert (await play(ImageTask(), row, "echo '# hm' >> double.py"))[1].reward == 0.0


@pytest.fixture(autouse=True)
def without_harness(monkeypatch):
    monkeypatch.setattr(harness, "find_harness", lambda kind: None)


async def test_correct_fix_has_reward_one(play):
    result, judgement = await play(LocalTask(), ROW, f"{FIX}\nprintf '\\377\\0' >> logo.bin; git commit -qam mine")
    assert judgement.reward == 1.0
    assert judgement.parts == {"resolved": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0}
    assert result["git_patch"].startswith("diff --git a/double.py b/double.py")
    assert "logo.bin" not in result["git_patch"], "binary files are no patch"
    assert "left over" not in result["git_patch"], "what was there before is not the agent's"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, reward, parts",
    [
        ("echo '# hm' >> double.py", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0}),
        pytest.param(
            *("echo 'def double(n): return n - 2' > double.py", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 0.0}),
            marks=pytest.mark.full,
        ),
        ("echo 'def test_two(): pass' > test_double.py", 0.0, {"fail_to_pass": 0.0, "pass_to_pass": 1.0}),
        pytest.param(
            *(f"{FIX}; rm test_double.py", 1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0}), marks=pytest.mark.full
        ),
        (f"{FIX}; mkdir sub; cd sub; git init -q; touch x", 1.0, {"fail_to_pass": 1.0, "pass_to_pass": 1.0}),
    ],
)
async def test_reward_follows_test_outcomes(play, script, reward, parts):
    _, judgement = await play(LocalTask(), ROW, script)
    assert judgement.reward == reward
    assert judgement.parts == {"resolved": reward, **parts}


@pytest.mark.parametrize("script", ["true", "rm -rf .git; echo >> double.py", "printf '\\377\\0' > new.bin"])
async def test_missing_patch_ends_as_no_git_patch(play, script):
    result, judgement = await play(LocalTask(), ROW, script)
    assert (result["git_patch"], judgement.reward, judgement.finish_reason) == ("", 0.0, "no_git_patch")


@pytest.mark.slow
async def test_r2e_rows_are_graded_by_script(play):
    seen = "[ -e r2e_tests ] || [ -e run_tests.sh ] && exit"  # the agent must not find them
    _, judgement = await play(LocalR2E(), R2E_ROW, f"{seen}\n{FIX}")
    assert judgement.reward == 1.0
    _, judgement = await play(LocalR2E(), R2E_ROW, "echo '# hm' >> double.py")
    assert judgement.reward == 0.0


@pytest.mark.full
async def test_smith_rows_restore_tests_from_history(play):
    row = {key: value for key, value in ROW.items() if key != "test_patch"}
    row |= {"data_source": "swe-smith", "image_name": "it"}
    _, judgement = await play(LocalSmith(), row, f"[ -e test_double.py ] && exit\n{FIX}")
    assert (judgement.reward, judgement.parts["fail_to_pass"]) == (1.0, 1.0)
    _, judgement = await play(LocalSmith(), row, "echo '# hm' >> double.py")
    assert (judgement.reward, judgement.parts["pass_to_pass"]) == (0.0, 1.0)


@pytest.mark.full
async def test_missing_named_test_gives_no_verdict(play):
    row = ROW | {"FAIL_TO_PASS": ["test_double.py::test_two", "test_double.py::test_three"]}
    with pytest.raises(TaskRowError, match="test_three"):
        await play(LocalTask(), row, FIX)
    assert (await play(LocalTask(), row, "echo '# hm' >> double.py"))[1].reward == 0.0, "a test was run and failed"


@pytest.mark.full
async def test_r2e_script_without_outcome_gives_no_verdict(play):
    class WithoutTests(LocalR2E):
        files: ClassVar = LocalR2E.files | {"run_tests.sh": "no-such-tool"}

    with pytest.raises(TaskRowError, match=r"exit status 127"):
        await play(WithoutTests(), R2E_ROW, FIX)
    assert (await play(LocalR2E(), R2E_ROW, "echo 'raise SystemExit' > double.py"))[1].reward == 0.0
