"""`python -m skyrl_agent.validate`: rows that can teach something, and rows that cannot."""

import json
import re

import pytest
import yaml

from skyrl_agent.validate import main

from .test_tests_not_run import RIGHT, ROW, TESTS, WRONG

GOOD = ROW | {"solution": {"calc.py": RIGHT}}
ROWS = {
    "good": GOOD,
    "by name": GOOD | {"fail_to_pass": ["test_calc.py::test_two"], "edit_file": "calc.py", "solution": RIGHT},
    "nothing to do": GOOD | {"files": ROW["files"] | {"calc.py": RIGHT}},
    "wrong solution": GOOD | {"solution": {"calc.py": WRONG}},
    "no such test": GOOD | {"fail_to_pass": ["test_calc.py::test_two", "test_calc.py::test_three"]},
    "no command": GOOD | {"test_cmd": "no-such-tool"},
    "no dependency": ROW | {"files": ROW["files"] | {"test_calc.py": f"import no_such_dependency\n{TESTS}"}},
    "no files": GOOD | {"files": {}},
}


@pytest.fixture
def validate(tmp_path, capsys, sandboxed):
    """`validate(rows, **task file keys)`: (exit status, what is said)."""

    def run(rows, **keys):
        task = {"task": "skyrl_agent.tasks.local_swe.LocalSWETask", "data": {"instance_id_key": "id"}} | keys
        (tmp_path / "task.yaml").write_text(yaml.safe_dump(task | {"runtime": {"kind": "local"}}))
        lines = (json.dumps(row | {"id": name}) for name, row in rows.items())
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        status = main([str(tmp_path / "task.yaml"), str(tmp_path / "rows.jsonl"), "--parallel", "2"])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


@pytest.mark.slow
def test_validate_names_bad_rows_and_exits_with_one(validate):
    status, said = validate(ROWS)
    assert status == 1
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in said.splitlines()[1:-1]]
    problems = {name: problem for name, problem in lines}
    assert problems.pop("row 7").startswith("LocalSWETask, row no files: files must map")
    assert problems == {
        "nothing to do": "the original already passes",
        "wrong solution": "its reference solution fails: resolved 0, tests_passed 0, timed_out 0",
        "no such test": "test test_calc.py::test_three: there is no test of that name",
        "no command": "exit status 127: bash: line 1: no-such-tool: command not found",
        "no dependency": "not run on the original: collection of test_calc.py: ModuleNotFoundError: "
        "No module named 'no_such_dependency'",
    }
    assert said.endswith("2 of 8 rows are good, 6 bad; 2 have no solution: only their original was checked\n")


def test_validate_exits_with_zero_when_all_rows_pass(validate):
    assert validate({"good": GOOD}) == (0, "1 of 1 rows are good, 0 bad\n")


def test_validate_rejects_task_without_tests(validate):
    status, said = validate({"a": {}}, task="skyrl_agent.tasks.general_react.utils.GeneralReactTask")
    assert status == 2
    assert "no tests to run without an agent" in said
