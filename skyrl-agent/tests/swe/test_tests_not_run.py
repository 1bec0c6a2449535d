"""Test commands that do not run: no verdict where the task is to blame, a reward of 0 where the agent's change is."""

from typing import Any

import pytest

from skyrl_agent.errors import InfraError, TaskRowError
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.local_swe import LocalSWETask
from skyrl_agent.tasks.terminal import TerminalTask

from .swe_oracle import oracle_runner

WRONG = "def double(n):\n    return n\n"
RIGHT = "def double(n):\n    return 2 * n\n"
TESTS = "from calc import double\n\ndef test_two():\n    assert double(2) == 4\n"
SCRIPT = "#!/bin/sh\npython3 -c 'import calc; assert calc.double(2) == 4'\n"
ROW = {
    "files": {"calc.py": WRONG, "test_calc.py": TESTS, "helper.sh": SCRIPT},
    "test_cmd": "python -m pytest -q test_calc.py",
    "problem_statement": "double(n) should be twice n",
}
FIX = f"cat > calc.py <<'X'\n{RIGHT}X\n"
NO_FIX = "echo '# hm' >> calc.py"


def with_files(**files: str) -> dict:
    return {"files": ROW["files"] | {path.replace("__", "."): text for path, text in files.items()}}


def every_third_daily(cases: dict[str, Any]) -> list[Any]:
    """Return the cases as parameters of a test: of three one is daily, one slow, one full."""
    marks: list[Any] = [pytest.mark.full, (), pytest.mark.slow]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=marks[number % 3])
        for number, (name, case) in enumerate(cases.items(), 1)
    ]


BROKEN_ROWS = {
    "no such program": {"test_cmd": "no-such-tool check"},
    "not executable": with_files(run__txt="true\n") | {"test_cmd": "./run.txt"},
    "no such test file": {"test_cmd": "python -m pytest -q test_other.py"},
    "no such test": {"fail_to_pass": ["test_calc.py::test_three"]},
    "one of the named tests": {"fail_to_pass": ["test_calc.py::test_two", "test_calc.py::test_three"]},
    "no test is selected": {"test_cmd": "python -m pytest -q -k nothing"},
    "no such option": {"test_cmd": "python -m pytest -q --no-such-option"},
    "usage error in a shell": {"test_cmd": "cd . && python3 -m pytest -q test_other.py"},
    "pytest missing in a shell": {"test_cmd": "cd . && python3 -S -m pytest -q"},
    "pytest missing in make": with_files(Makefile="test:\n\tno-such-tool\n") | {"test_cmd": "make test"},
    "import of a test": with_files(test_calc__py=f"import no_such_dependency\n{TESTS}"),
    "import of a conftest": with_files(conftest__py="import no_such_dependency\n"),
    "syntax of a test": with_files(test_calc__py=f"{TESTS}\n)"),
    "all tests are skipped": with_files(test_calc__py=f"import pytest\npytest.importorskip('no_such')\n{TESTS}"),
}


@pytest.mark.first_case
@pytest.mark.parametrize("change", every_third_daily(BROKEN_ROWS))
async def test_unrunnable_test_command_gives_no_verdict(play, change):
    with pytest.raises(TaskRowError, match="row row"):
        await play(LocalSWETask(), ROW | change, FIX)


async def test_correct_fix_with_broken_test_command_has_no_reward(sandboxed):
    row = ROW | {"id": "a", "edit_file": "calc.py", "solution": RIGHT, "test_cmd": "no-such-tool check"}
    rows = await oracle_runner([row]).rows([row])
    assert (rows.finish_reasons, rows.in_baseline) == (["error_evaluation"], [False])
    [failure] = rows.failures
    assert (failure.stage, failure.kind) == ("evaluate", "reward")
    assert "tests were not run: exit status 127 (bash: line 1: no-such-tool: command not found)" in failure.message


SABOTAGE = {
    "test script exits 127": ("./helper.sh", "printf '#!/bin/sh\\nexit 127' > helper.sh"),
    "test script has no interpreter": ("./helper.sh", "printf '#!/no/such/interpreter\\n' > helper.sh"),
    "test script is removed": ("./helper.sh", "rm helper.sh"),
    "test script is no program": ("./helper.sh", "rm helper.sh; mkdir helper.sh; touch helper.sh/x"),
    "pytest is said to be missing": (
        "python3 -c 'import calc'",
        "echo 'print(\"No module named pytest\"); 1/0' > calc.py",
    ),
    "module is no Python": (ROW["test_cmd"], "echo ')' > calc.py"),
    "module needs what is not there": (ROW["test_cmd"], "echo 'import no_such_dependency' > calc.py"),
    "module is removed": (ROW["test_cmd"], "rm calc.py"),
    "module skips its tests": (ROW["test_cmd"], "echo 'import pytest; pytest.skip(allow_module_level=True)' > calc.py"),
    "module ends the process": (ROW["test_cmd"], "echo 'import os; os._exit(127)' > calc.py"),
    "module never ends": (ROW["test_cmd"], "echo 'while True: pass' > calc.py"),
    "pytest is hidden": (ROW["test_cmd"], "mkdir pytest; echo 'raise ImportError' > pytest/__init__.py"),
    "interpreter is replaced": (ROW["test_cmd"], "printf '#!/bin/sh\\nexit 127' > python3; chmod +x python3"),
    "named test loses its parameters": (
        "python -m pytest -q test_cases.py",
        "echo 'CASES = []\ndef double(n): return n' > calc.py",
    ),
}


@pytest.mark.first_case
@pytest.mark.parametrize("test_cmd, script", every_third_daily(SABOTAGE))
async def test_change_breaking_tests_is_agent_failure(play, test_cmd, script):
    cases = (
        "import calc, pytest\n@pytest.mark.parametrize('n', calc.CASES)\ndef test_it(n): assert calc.double(n) == 2 * n"
    )
    row = ROW | with_files(calc__py=f"CASES = [1]\n{WRONG}", test_cases__py=cases)
    row |= {"test_cmd": test_cmd, "test_seconds": 2 if "never" in script or "while" in script else 30}
    _, judgement = await play(LocalSWETask(), row, script)
    assert judgement.reward == 0.0


ABSENT = {
    "module": ("from new_module import double", "Make new_module.py with double(n)."),
    "name": ("from calc import twice as double", "Add twice(n) to calc."),
}


@pytest.mark.slow
@pytest.mark.first_case
@pytest.mark.parametrize("line, statement", ABSENT.values(), ids=ABSENT)
async def test_missing_requested_code_is_agent_failure(play, line, statement):
    row = ROW | with_files(test_calc__py=f"{line}\n{TESTS.partition(chr(10))[2]}") | {"problem_statement": statement}
    _, judgement = await play(LocalSWETask(), row, NO_FIX)
    assert judgement.reward == 0.0
    _, judgement = await play(LocalSWETask(), row, f"{FIX} cp calc.py new_module.py; echo 'twice = double' >> calc.py")
    assert judgement.reward == 1.0


@pytest.mark.slow
async def test_row_solution_decides_verdict(play):
    missing = with_files(test_calc__py=f"import new_module\n{TESTS}")
    works = ROW | missing | {"solution": {"calc.py": RIGHT, "new_module.py": ""}}
    assert (await play(LocalSWETask(), works, FIX))[1].reward == 0.0
    with pytest.raises(TaskRowError, match="reference solution"):
        await play(LocalSWETask(), works | {"solution": {"calc.py": RIGHT}}, FIX)


async def test_scripts_keep_executable_bit(play):
    row = ROW | {"test_cmd": "./helper.sh && ./made.sh"}
    result, judgement = await play(
        LocalSWETask(), row, f"{FIX} printf '#!/bin/sh\\ntrue\\n' > made.sh; chmod +x made.sh"
    )
    assert judgement.reward == 1.0
    assert result["executable"] == ["made.sh"]
    assert "new file mode 100755\n--- /dev/null\n+++ b/made.sh" in result["git_patch"]


async def test_pytest_start_error_is_infrastructure_failure(play):
    with pytest.raises(InfraError, match=r"wall_time after 0\.\d s"):
        await play(LocalSWETask(), ROW | {"test_seconds": 0.001}, FIX)


@pytest.mark.parametrize("name", ["fail_to_pass", "pass_to_pass"])
def test_named_tests_require_plain_pytest_command(name):
    row = ROW | {"test_cmd": "make test", name: ["test_calc.py::test_two"]}
    with pytest.raises(TaskRowError, match="test_cmd"):
        LocalSWETask().check_row(Instance(row, "7"))


@pytest.mark.slow
async def test_unrunnable_terminal_check_gives_no_verdict(play):
    row = {"query": "Say 2.", "check": "no-such-tool"}
    with pytest.raises(TaskRowError, match="no-such-tool"):
        await play(TerminalTask(), row, answer="2")
    absent = {"query": "Make a program.", "check": "./program"}
    assert (await play(TerminalTask(), absent, "touch x"))[1].reward == 0.0
    hidden = {"query": "Say 2.", "check": "./given", "setup": "printf '#!/bin/sh\\n' > given; chmod +x given"}
    assert (await play(TerminalTask(), hidden, "chmod -x given"))[1].reward == 0.0
    with pytest.raises(TaskRowError, match=r"gold .*no-such-tool"):
        await play(TerminalTask(), {"query": "Say 2.", "gold": "no-such-tool"}, answer="echo 2")
