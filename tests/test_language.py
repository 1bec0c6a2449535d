"""Goals for language and shape of source, tests and examples, as measured by `dev/metrics.py`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "dev" / "metrics.py"
SPEC = importlib.util.spec_from_file_location("metrics_of_the_tree", PATH)
assert SPEC is not None and SPEC.loader is not None
metrics = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = metrics
SPEC.loader.exec_module(metrics)


@pytest.fixture(scope="module")
def measured():
    return {name: metrics.measure(name)[0] for name in metrics.PACKAGES}


@pytest.mark.parametrize("name", metrics.LIMITS)
@pytest.mark.parametrize("package", metrics.PACKAGES)
def test_package_meets_goal(measured, package, name):
    limit, figures = metrics.LIMITS[name], measured[package]
    bound, value = "at least" if limit.at_least else "at most", metrics.ROWS[limit.row](figures)
    places = f"; see metrics.py --list {name}" if name in metrics.LISTS else ""
    assert limit.is_met(figures), f"{package}: {limit.row}: {value:.2f}, {bound} {limit.goal}{places}"


@pytest.fixture(scope="module")
def measured_texts():
    return {name: metrics.measure_texts(name) for name in metrics.TEXT_TREES}


@pytest.mark.parametrize("name", metrics.TEXT_LIMITS)
@pytest.mark.parametrize("tree", metrics.TEXT_TREES)
def test_texts_of_tests_examples_and_kits_meet_goals(measured_texts, tree, name):
    limit, figures = metrics.TEXT_LIMITS[name], measured_texts[tree]
    places = metrics.LISTS[name](figures)
    few = len(places) <= 2  # of a tree with few docstrings these are more than the goal
    assert few or limit.is_met(figures), f"{tree}: {limit.row}: at most {limit.goal}\n" + "\n".join(places)


@pytest.mark.slow
def test_table_and_json_are_printed_without_imports_of_packages():
    command = [sys.executable, "-S", str(PATH), "--json"]  # -S: packages cannot be imported
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert '"lines of source"' in output
    assert '"places_per_change"' in output


@pytest.mark.parametrize(
    "source, name",
    [
        ('def f() -> int:\n    """What f is."""\n', "openings"),
        ('class A:\n    """Of a kind."""\n', "openings"),
        ("from typing import Any\n", "any"),
        ("class A: ...\n\n\nclass B:\n    class A: ...\n", "classes"),
        ("try:\n    f()\nexcept (ValueError, Exception):\n    pass\n", "unexplained"),
        ("def f(): ...\n", "documented"),
        ("import p.a\n", "modules"),
        ("def f(a) -> int: ...\n", "typed"),
        ('class A:\n    x: int = 0\n    """Of an answer."""\n', "fields"),
        ('LIMIT = 1\n"""What is longer is cut."""\n', "fields"),
        ('def f() -> None:\n    """Puts the rows in order."""\n', "third"),
        ("def test_what_is_late_is_dropped(): ...\n", "names"),
    ],
)
def test_place_is_found(tmp_path, monkeypatch, source, name):
    assert len(places_in(tmp_path, monkeypatch, source, name)) == 1


@pytest.mark.parametrize(
    "source, name",
    [
        ('def f() -> int:\n    """Compute what f is."""\n', "openings"),
        ('class A:\n    @property\n    def p(self) -> bool:\n        """Whether it is."""\n', "openings"),
        ("x = 1  # Any number\n", "any"),
        ("try:\n    f()\nexcept Exception:  # a user's code\n    pass\n", "unexplained"),
        ("try:\n    f()\nexcept BaseException:\n    g()\n    raise\n", "excepts"),
        ('class A:\n "A."\n def f(self):\n  "Do."\nclass B(A):\n "B."\n def f(self): ...\n', "documented"),
        ("def _f(): ...\n", "documented"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a\n", "modules"),
        ("def f(a: int) -> int: ...\n", "typed"),
        ('class A:\n    x: int = 0\n    """Number of answers."""\n', "fields"),
        ('class A:\n    x: bool = False\n    """Whether it is late."""\n', "fields"),
        ('def f() -> None:\n    """Settings of the model."""\n', "third"),
        ('def f() -> None:\n    """Process the rows."""\n', "third"),
        ('class A:\n    def run(self, context: ToolContext) -> str:\n        """Runs a program."""\n', "third"),
        ("def test_late_groups_are_dropped(): ...\n", "names"),
    ],
)
def test_place_is_not_counted(tmp_path, monkeypatch, source, name):
    assert not places_in(tmp_path, monkeypatch, source, name)


def places_in(tmp_path, monkeypatch, source: str, name: str) -> list[str]:
    monkeypatch.setitem(metrics.PACKAGES, "p", ("p", "tests"))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.py").write_text("import p.b\n")
    (tmp_path / "p" / "b.py").write_text(source)
    return metrics.LISTS[name](metrics.measure("p", tmp_path)[0])
