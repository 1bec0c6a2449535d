"""Costs of tests are counted, budgets are held, and what starts servers, engines or Ray carries a marker."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MARKERS = {"process", "slow", "full", "gpu", "network"}
STARTERS = {"ServerProcess", "EngineProcess", "ProcessRanks", "RayRanks", "initialize_ray", "RayWorkerGroup"}
STARTERS |= {"ray_cpu", "run_in_process", "vllm_server"}
"""Names that start processes which import torch: a test that reaches one of them needs a marker."""
TEST_FILES = sorted(
    file
    for folder in ("tests", "skyrl-gym/tests", "skyrl-train/tests", "skyrl-agent/tests", "skyrl-tx/tests")
    for file in (ROOT / folder).rglob("*.py")
)

COSTLY = """
import subprocess, sys, time
import pytest

def test_starts_two_processes():
    for _ in range(2): subprocess.run([sys.executable, "-c", ""], check=True)

{mark}
def test_takes_processor_time():
    end = time.process_time() + 1.0
    while time.process_time() < end: pass
"""


@pytest.mark.slow
def test_run_fails_when_tests_exceed_file_budget(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")
    (tmp_path / "tests" / "budgets.toml").write_text('default = 0.9\n[files]\n"tests/test_large.py" = 60\n')
    (tmp_path / "tests" / "test_over.py").write_text(COSTLY.format(mark=""))
    (tmp_path / "tests" / "test_large.py").write_text(COSTLY.format(mark=""))
    (tmp_path / "tests" / "test_slow.py").write_text(COSTLY.format(mark="@pytest.mark.slow"))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "xdist", "--cost", *arguments]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # most plugins import for seconds
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    over = run("-n", "1")
    assert over.returncode == 1 and "6 passed" in over.stdout, over.stdout
    budget_lines = [line for line in over.stdout.splitlines() if "its budget in" in line]
    assert [line.split()[0] for line in budget_lines] == ["tests/test_over.py"]
    held = run("tests/test_slow.py", "tests/test_large.py")
    assert held.returncode == 0 and "its budget in" not in held.stdout, held.stdout
    *_, processes, _, tests, _ = next(
        line for line in held.stdout.splitlines() if line.endswith("test_slow.py")
    ).split()
    assert (processes, tests) == ("2", "2")


def test_budgets_name_existing_files():
    budgets = tomllib.loads((ROOT / "tests" / "budgets.toml").read_text())
    assert [file for file in budgets["files"] if not (ROOT / file).is_file()] == []
    assert all(seconds > budgets["default"] for seconds in budgets["files"].values())


@pytest.mark.slow
def test_tests_starting_servers_or_ray_are_marked():
    unmarked = [f"{file.relative_to(ROOT)}::{name}" for file in TEST_FILES for name in unmarked_tests(file)]
    assert unmarked == [], "mark them process, slow or full"


def unmarked_tests(file: Path) -> Iterator[str]:
    """Yield the names of tests without a marker that reach a name of `STARTERS`, themselves or through functions and
    fixtures of their file and of the `conftest.py` files above it."""
    module = ast.parse(file.read_text())
    values = assigned_values(module)
    if not file.name.startswith("test_") or ("pytestmark" in values and MARKERS & markers_of(values["pytestmark"])):
        return
    functions: dict[str, ast.AST] = {}
    for above in reversed([folder / "conftest.py" for folder in file.parents if ROOT in folder.parents]):
        if above.is_file():
            functions |= definitions(ast.parse(above.read_text()))
    functions |= definitions(module)
    for name, function in definitions(module).items():
        decorators: list[ast.AST] = getattr(function, "decorator_list", [])
        named = [values[each] for decorator in decorators for each in names_in(decorator) if each in values]
        marked = MARKERS & markers_of(*decorators, *named)
        if name.startswith("test_") and not marked and STARTERS & reachable(function, functions):
            yield name


def definitions(module: ast.Module) -> dict[str, ast.AST]:
    return {
        node.name: node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def assigned_values(module: ast.Module) -> dict[str, ast.expr]:
    """Return the values of the names that a module assigns to."""
    assignments = [node for node in module.body if isinstance(node, ast.Assign)]
    return {target.id: node.value for node in assignments for target in node.targets if isinstance(target, ast.Name)}


def markers_of(*expressions: ast.AST) -> set[str]:
    """Return the names of attributes, among them those of `pytest.mark`."""
    return {node.attr for each in expressions for node in ast.walk(each) if isinstance(node, ast.Attribute)}


def names_in(function: ast.AST) -> set[str]:
    """Return the names and arguments of a function, without those of its annotations."""
    annotations = {
        id(part)
        for node in ast.walk(function)
        for field in ("annotation", "returns")
        if (annotation := getattr(node, field, None)) is not None
        for part in ast.walk(annotation)
    }
    nodes = [node for node in ast.walk(function) if id(node) not in annotations]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def reachable(function: ast.AST, functions: dict[str, ast.AST]) -> set[str]:
    seen: set[str] = set()
    new = names_in(function)
    while new:
        seen |= new
        new = {name for each in new if each in functions for name in names_in(functions[each])} - seen
    return seen
