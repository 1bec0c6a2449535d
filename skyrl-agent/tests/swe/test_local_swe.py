"""Software tasks with their own files: what is judged, and what does not help."""

import shutil
import subprocess

import pytest

from skyrl_agent.errors import TaskRowError
from skyrl_agent.runtimes import make_runtime
from skyrl_agent.runtimes.base import Limits
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.changes import build_unified_diff
from skyrl_agent.tasks.local_swe import LocalSWETask, is_test_file
from skyrl_agent.tasks.tests_run import parse_pytest_arguments, run_tests

WRONG = "def double(n):\n    return n\n"
RIGHT = "def double(n):\n    return 2 * n\n"
TESTS = """import pytest
from calc.double import double

def test_nothing():
    assert double(0) == 0

@pytest.mark.parametrize("n", [1, 7])
def test_double(n):
    assert double(n) == 2 * n

@pytest.mark.skip(reason="too long")
def test_not_run():
    assert False
"""
ROW = {
    "files": {"calc/double.py": WRONG, "calc/other.py": "x = 1\n", "tests/test_double.py": TESTS},
    "edit_file": "calc/double.py",
    "test_cmd": "python -m pytest -q tests",
    "problem_statement": "double(n) should be twice n",
}
FIX = f"cat > calc/double.py <<'X'\n{RIGHT}X"


async def test_correct_fix_has_reward_one(play):
    result, judgement = await play(LocalSWETask(), ROW, FIX)
    assert judgement.reward == 1.0
    assert judgement.parts == {"resolved": 1.0, "tests_passed": 1.0, "timed_out": 0.0}
    assert result["files"] == {"calc/double.py": RIGHT}
    assert "-    return n\n+    return 2 * n\n" in result["git_patch"]


async def test_incorrect_change_has_reward_zero(play):
    _, judgement = await play(LocalSWETask(), ROW, "echo '# hm' >> calc/double.py")
    assert (judgement.reward, judgement.finish_reason) == (0.0, None)
    assert judgement.parts["tests_passed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("finish_reason, ending", [("FINISH_TOOL", "no_git_patch"), ("max_iterations_reached", None)])
async def test_missing_change_has_separate_finish_reason(play, finish_reason, ending):
    result, judgement = await play(LocalSWETask(), ROW, finish_reason=finish_reason)
    assert (result["git_patch"], judgement.reward, judgement.finish_reason) == ("", 0.0, ending)


@pytest.mark.first_case
@pytest.mark.parametrize(
    "script",
    [
        "echo 'def test(): pass' > tests/test_double.py",
        "rm -r tests; echo '# hm' >> calc/double.py",
        "echo '# hm' >> calc/double.py; printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
        "echo '# hm' >> calc/double.py; printf '[pytest]\\npython_files = none\\n' > tox.ini",
        "printf 'def pytest_collection_modifyitems(items): items.clear()' > conftest.py; echo >> calc/double.py",
        "printf 'def pytest_runtest_makereport(): raise SystemExit(0)' > calc/conftest.py; echo >> calc/double.py",
        "printf 'import os\\nos._exit(0)' > pytest.py; echo '# hm' >> calc/double.py",
        "mkdir _pytest; printf 'import os\\nos._exit(0)' > _pytest/__init__.py; echo '# hm' >> calc/double.py",
        "printf 'import os\\nos._exit(0)' > json.py; echo '# hm' >> calc/double.py",
        "printf 'import os\\nos._exit(0)' > sitecustomize.py; echo '# hm' >> calc/double.py",
        "printf 'import os\\nos._exit(0)' > calc/double.py",
        "printf 'import sys\\nsys.exit(0)' > calc/double.py",
        "printf 'import pytest\\ndef double(n):\\n  pytest.skip()' > calc/double.py",
        "printf 'import pytest\\ndef double(n):\\n  pytest.xfail()' > calc/double.py",
        "printf 'import pytest\\npytest.skip(allow_module_level=True)' > calc/double.py",
        "printf 'print(\"3 passed in 0.1s\")\\ndef double(n): return 0' > calc/double.py",
        "printf 'raise KeyboardInterrupt' > calc/double.py",
        "rm calc/double.py",
        "rm calc/double.py; ln -s ../tests/test_double.py calc/double.py",
        "mv calc calc2",
    ],
)
async def test_tampering_does_not_raise_reward(play, script):
    _, judgement = await play(LocalSWETask(), ROW, script)
    assert judgement.reward == 0.0


BROKEN = "rm -r tests\necho broken > conftest.py\nrm calc/other.py; mkdir calc/other.py; touch calc/other.py/x"
TWICE = """echo 'def twice(n): return 2 * n' > calc/twice.py
echo 'from calc.twice import twice as double' > calc/double.py"""
NO_TEXT = "printf '\\377' > calc/binary; head -c 2000000 /dev/urandom > big; mkfifo pipe"
FULL = "for i in 1 2 3 4 5 6 7 8 9; do head -c 40000000 /dev/urandom > big$i; done"


@pytest.mark.parametrize(
    "script, files, left_out",
    [
        pytest.param(f"{FIX}\n{BROKEN}", None, None, id="a fix beside broken tests"),
        pytest.param(TWICE, {"calc/double.py", "calc/twice.py"}, None, id="new files are kept"),
        pytest.param(f"{FIX}\n{NO_TEXT}", None, ["big", "calc/binary", "pipe"], id="binary changes are left out"),
        pytest.param(f"{FIX}\n{FULL}", {"calc/double.py"}, None, id="a full workspace"),
    ],
)
async def test_fix_counts_despite_unrelated_files(play, script, files, left_out):
    result, judgement = await play(LocalSWETask(), ROW, script)
    assert judgement.reward == 1.0
    # The agent may be ended between making a big file and its first byte: an empty file is a text.
    assert files is None or {path for path, text in result["files"].items() if text} == files
    assert left_out is None or sorted(result["left_out"]) == left_out


async def test_missing_edit_files_allow_all_files_but_tests(play):
    row = {key: value for key, value in ROW.items() if key != "edit_file"}
    result, judgement = await play(
        LocalSWETask(), row, f"{FIX}\necho y = 2 >> calc/other.py; echo >> tests/test_double.py"
    )
    assert judgement.reward == 1.0
    assert set(result["files"]) == {"calc/double.py", "calc/other.py"}


async def test_named_tests_determine_reward(play):
    row = ROW | {
        "fail_to_pass": ["tests/test_double.py::test_double[1]"],
        "pass_to_pass": '["tests/test_double.py::test_nothing"]',
    }
    only_one = "printf 'def double(n): return 2 * (n == 1)' > calc/double.py"
    _, judgement = await play(LocalSWETask(), row, only_one)
    assert (judgement.reward, judgement.parts["fail_to_pass"], judgement.parts["pass_to_pass"]) == (1.0, 1.0, 1.0)
    _, judgement = await play(LocalSWETask(), row, "printf 'def double(n): return n / n' > calc/double.py")
    assert (judgement.reward, judgement.parts["fail_to_pass"], judgement.parts["pass_to_pass"]) == (0.0, 0.0, 0.0)


@pytest.mark.slow
async def test_hanging_tests_are_failure_of_change(play):
    _, judgement = await play(LocalSWETask(), ROW | {"test_seconds": 5}, "printf 'while True: pass' > calc/double.py")
    assert (judgement.reward, judgement.parts["timed_out"]) == (0.0, 1.0)


async def test_custom_command_can_grade(play):
    row = ROW | {"test_cmd": "python -c 'from calc.double import double; assert double(2) == 4' && echo fine"}
    assert (await play(LocalSWETask(), row, FIX))[1].reward == 1.0
    assert (await play(LocalSWETask(), row, "echo >> calc/double.py"))[1].reward == 0.0


async def test_hidden_tests_determine_reward(play):
    script = f"ls tests && exit\n{FIX}"
    result, judgement = await play(LocalSWETask(show_tests=False), ROW, script)
    assert (judgement.reward, set(result["files"])) == (1.0, {"calc/double.py"})


async def test_missing_pytest_is_not_agent_failure(sandboxed, monkeypatch):
    task, instance = LocalSWETask(), Instance(ROW, "row")
    async with make_runtime(task.evaluation_runtime_spec(instance)) as runtime:
        runtime.python = "/usr/bin/python3"
        here = await runtime.exec(["/usr/bin/python3", "-I", "-c", "import pytest"])
        if here.ok or here.returncode != 1:
            pytest.skip("the system's Python has pytest, or is none")
        with pytest.raises(Exception, match=r"pytest cannot be imported by /usr/bin/python3.*pip install"):
            await run_tests(runtime, ROW["test_cmd"], Limits())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"files": {}}, "files must map"),
        ({"files": {"../x": ""}}, "relative to the working directory"),
        ({"files": {"x.py": 3}}, "must have text for 'x.py'"),
        ({"test_cmd": " "}, "test_cmd must be the command"),
        ({"edit_file": "nowhere.py"}, r"edit_files names 'nowhere.py', which is not in files"),
        ({"test_seconds": 0}, "test_seconds must be a positive number"),
    ],
)
def test_invalid_rows_are_rejected(change, message):
    with pytest.raises(TaskRowError, match=f"row 7: .*{message}"):
        LocalSWETask().check_row(Instance(ROW | change, "7"))


def test_rows_are_read_from_tables():
    """Files as JSON, or with a null for each file that only other rows have."""
    files = {**ROW["files"], "elsewhere.py": None}
    task = LocalSWETask()
    assert task.runtime_spec(Instance(ROW | {"files": files}, "a")).files == ROW["files"]


def test_instructions_name_edit_files_and_test_command(rows):
    for name in ("swe/quixbugs", "swe/exercism_python"):
        for row in rows(name):
            instance = Instance(row, row["id"])
            LocalSWETask().check_row(instance)
            _, user = LocalSWETask().get_instruction(instance)
            assert row.get("edit_file", row.get("edit_files", [""])[0]) in user["content"]
            assert row["test_cmd"] in user["content"]


@pytest.mark.parametrize(
    "path, is_test",
    [
        ("test_a.py", True),
        ("a_test.py", True),
        ("pkg/tests/helper.py", True),
        ("conftest.py", True),
        ("setup.cfg", True),
        ("contest.py", False),
        ("pkg/testing.py", False),
        ("test_data.json", False),
    ],
)
def test_test_files_are_recognized_by_name(path, is_test):
    assert is_test_file(path) is is_test


@pytest.mark.parametrize(
    "command, arguments",
    [
        ("python -m pytest -q a.py", ["-q", "a.py"]),
        ("pytest 'a b.py'", ["a b.py"]),
        ("pytest a.py; true", None),
        ("pytest $HOME", None),
        ("make test", None),
        ("pytest 'a", None),
    ],
)
def test_plain_pytest_command_is_recognized(command, arguments):
    assert parse_pytest_arguments(command) == arguments


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_patches_apply(tmp_path):
    old = {"a.py": "1\n2\n3", "b/c.py": "x\r\ny\x0cz\n", "gone.py": "bye\n", "same.py": "s\n", "empty.py": ""}
    new = {"a.py": "1\n2\n4", "b/c.py": "x\r\ny\x0cw", "gone.py": None, "new/d.py": "no end", "empty.py": "now\n"}
    for path, text in old.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, newline="")
    patch = build_unified_diff(old, new)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, check=True, input=patch.encode())
    for path, text in (old | new).items():
        assert ((tmp_path / path).read_bytes().decode() if (tmp_path / path).exists() else None) == text
