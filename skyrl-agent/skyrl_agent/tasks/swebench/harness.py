"""Judging by the benchmarks' own packages (`swebench`, and its relative `swegym`), where they are installed.

Written against their published sources (swebench 4: `harness.test_spec.test_spec`, `harness.grading`); neither the
packages nor their images are part of this project's tests.
"""

import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from skyrl_agent.types import JsonObject, Row

PACKAGES = {"swe-gym": "swegym"}


def find_harness(kind: str) -> str | None:
    """Return the package that grades rows of a kind; None if it is not installed."""
    package = PACKAGES.get(kind, "swebench")
    return package if find_spec(package) is not None else None


def make_test_spec(package: str, row: Row) -> Any:
    """Build the specification of a row's tests; its `eval_script` is the shell script that runs them."""
    try:
        module = import_module(f"{package}.harness.test_spec.test_spec")
    except ModuleNotFoundError:  # before version 3
        module = import_module(f"{package}.harness.test_spec")
    return module.make_test_spec(dict(row))


def build_report(package: str, spec: object, instance_id: str, patch: str, log: str) -> JsonObject:
    """Return `resolved`, `tests_status`, ...

    Args:
        log: both outputs of the script together.
    """
    prediction = {"instance_id": instance_id, "model_name_or_path": "agent", "model_patch": patch}
    grading = import_module(f"{package}.harness.grading")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test_output.txt")
        path.write_text(log)
        return grading.get_eval_report(spec, prediction, str(path), True)[instance_id]
