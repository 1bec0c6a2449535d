"""Processing of SWE rows without their images: names, patches, logs. On the benchmarks' own rows."""

import json

import pytest

from skyrl_agent.errors import ConfigError, TaskRowError
from skyrl_agent.tasks.base import Instance
from skyrl_agent.tasks.swebench import SWEBenchTask, harness
from skyrl_agent.tasks.swebench.patches import list_changed_paths, remove_binary, split_files
from skyrl_agent.tasks.swebench.r2e_utils import (
    compute_passed_fraction,
    get_reward,
    parse_log_by_path,
    parse_log_pytest,
)
from skyrl_agent.tasks.swebench.sources import get_image, get_kind, get_source

BINARY_PART = """diff --git a/logo.png b/logo.png
new file mode 100644
index 000..111
GIT binary patch
literal 4
LcmZQzWMT#Y01f~L

literal 0
HcmV?d00001

"""
TEXT_PART = """diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -1 +1 @@
-GIT binary patches are text here
+as is this
"""
DELETED_PART = """diff --git a/old.py b/old.py
deleted file mode 100644
--- a/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
"""
LOG = """
==== test session starts ====
PASSED not in the summary::test
\x1b[36m==== short test summary info ====\x1b[0m
\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mTestA::test_one[1-2]\x1b[0m
PASSED tests/test_a.py::test_two
FAILED tests/test_a.py::test_three - AssertionError: a::b - c
ERROR tests/test_b.py - ImportError
SKIPPED [1] tests/test_c.py:3: not now
XFAIL tests/test_a.py::test_four - known
==== 1 failed, 2 passed in 0.1s ====
"""


@pytest.mark.parametrize(
    "data_source, row, instance_id, image",
    [
        ("SWE-bench", {}, "django__Django-11099", "xingyaoww/sweb.eval.x86_64.django_s_django-11099"),
        ("swe-gym/lite", {}, "python__mypy-1", "xingyaoww/sweb.eval.x86_64.python_s_mypy-1"),
        (
            "swe-smith",
            {"image_name": "swesmith.x86_64.oauthlib__oauthlib.1fd5"},
            "oauthlib__oauthlib.1fd5.x",
            "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd5",
        ),
        ("r2e-gym", {}, "namanjain12/orange3_final:2d9617bd", "namanjain12/orange3_final:2d9617bd"),
        ("r2e-gym", {"docker_image": "me/mine:1"}, "anything", "me/mine:1"),
    ],
)
def test_image_names_match_published_names(data_source, row, instance_id, image):
    assert get_image(get_kind(data_source), row, instance_id) == image


def test_image_prefix_is_read_from_environment(monkeypatch):
    monkeypatch.setenv("EVAL_DOCKER_IMAGE_PREFIX", "mirror.example/swe/")
    task = SWEBenchTask()
    spec = task.runtime_spec(Instance({"problem_statement": "x"}, "a__b-1"))
    assert (spec.kind, spec.image) == ("auto", "mirror.example/swe/sweb.eval.x86_64.a_s_b-1")
    assert spec.workdir == "/testbed"


def test_source_interpreter_comes_first_in_path():
    assert get_source("r2e-gym", {}, "x").path.startswith("/testbed/.venv/bin:")
    assert get_source("swe-bench", {}, "x").path.startswith("/opt/miniconda3/envs/testbed/bin:")


def test_binary_files_are_removed_from_patch():
    patch = TEXT_PART + BINARY_PART + DELETED_PART
    assert remove_binary(patch) == TEXT_PART + DELETED_PART
    assert remove_binary(BINARY_PART) == ""
    assert remove_binary(TEXT_PART.rstrip("\n")) == TEXT_PART
    assert list_changed_paths(patch) == ["a.py"]


def test_published_patches_split_and_join_unchanged(rows):
    patches = [row[field] for row in rows("swe/swebench_lite") for field in ("patch", "test_patch")]
    assert len(patches) == 600
    for patch in patches:
        assert "".join(split_files(patch)) == patch
        assert remove_binary(patch).strip() == patch.strip()
        kept = [part for part in split_files(patch) if "\n@@ " in part and "\n+++ /dev/null" not in part]
        assert len(list_changed_paths(patch)) == len(kept)


def test_pytest_summary_is_parsed():
    assert parse_log_pytest(LOG) == {
        "TestA.test_one[1-2]": "PASSED",
        "test_two": "PASSED",
        "test_three": "FAILED",
        "": "ERROR",
    }
    by_path = parse_log_by_path(LOG)
    assert by_path["tests/test_a.py::TestA::test_one[1-2]"] == "PASSED"
    assert by_path["tests/test_a.py::test_four"] == "XFAIL"
    names = ["tests/test_a.py::test_two", "tests/test_a.py::test_three"]
    assert compute_passed_fraction(by_path, names) == 0.5
    assert compute_passed_fraction({}, []) == 1.0
    assert parse_log_pytest("killed before the end") == {}


def test_parsed_test_names_match_rows(rows):
    """A log in pytest's form of each row's tests, parsed, has every one of them."""
    tried = 0
    for row in rows("swe/swebench_full_metadata"):
        names = row["FAIL_TO_PASS"] + row["PASS_TO_PASS"]
        if "::" not in names[0]:
            continue
        lines = [f"{('PASSED', 'FAILED')[index % 2]} {name} - why" for index, name in enumerate(names)]
        outcomes = parse_log_by_path("=== short test summary info ===\n" + "\n".join(lines))
        assert set(names) <= set(outcomes)
        tried += len(names)
    assert tried > 500


@pytest.mark.parametrize(
    "expected, reward",
    [
        ({"TestA.test_one[1-2]": "PASSED", "test_two": "PASSED", "test_three": "FAILED", "": "ERROR"}, 1.0),
        ({"TestA.test_one[1-2]": "PASSED", "test_two": "PASSED", "test_three - why": "FAILED", "": "PASSED"}, 1.0),
        ({"TestA.test_one[1-2]": "PASSED", "test_two": "FAILED", "test_three": "FAILED", "": "ERROR"}, 0.0),
        ({"TestA.test_one[1-2]": "PASSED", "test_two": "PASSED", "test_three": "FAILED"}, 0.0),
        ({"TestA.test_one[1-2]": "PASSED", "other": "PASSED", "test_three": "FAILED", "": "ERROR"}, 0.0),
    ],
)
def test_r2e_reward(expected, reward):
    outcomes = parse_log_pytest(LOG)
    coloured = {f"\x1b[1m{name}\x1b[0m" if name else name: outcome for name, outcome in expected.items()}
    assert get_reward(outcomes, {"expected_output_json": json.dumps(expected)}) == reward
    assert get_reward(outcomes, {"expected_output_json": coloured}) == reward


def test_ungradable_rows_are_rejected(rows):
    task = SWEBenchTask()
    lite = rows("swe/swebench_lite")[0]
    with pytest.raises(TaskRowError, match="FAIL_TO_PASS"):
        task.check_row(Instance(lite, lite["instance_id"], "swe-bench"))
    with pytest.raises(TaskRowError, match="expected_output_json"):
        task.check_row(Instance(lite, "image", "r2e-gym"))
    with pytest.raises(TaskRowError, match="image_name"):
        task.check_row(Instance(lite, "x", "swe-smith"))
    with pytest.raises(TaskRowError, match="problem_statement"):
        task.check_row(Instance({}, "x", "swe-bench"))
    judged = 0
    for row in rows("swe/swebench_full_metadata"):
        instance = Instance(row, row["instance_id"], "swe-bench")
        if "::" in row["FAIL_TO_PASS"][0] or harness.find_harness("swe-bench"):
            task.check_row(instance)
            judged += 1
        else:
            with pytest.raises(ConfigError, match="pip install swebench"):
                task.check_row(instance)
    assert judged >= 7


def test_instruction_contains_issue_without_solution(rows):
    for row in rows("swe/swebench_full_metadata"):
        system, user = SWEBenchTask().get_instruction(Instance(row, row["instance_id"], "swe-bench"))
        assert row["problem_statement"].strip() in user["content"]
        assert row["patch"] not in user["content"] + system["content"]
