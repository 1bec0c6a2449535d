"""Goals for the language and shape of the source, measured by `dev/metrics.py`; ceilings are in `language.toml`."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "dev" / "metrics.py"
SPEC = importlib.util.spec_from_file_location("metrics_of_the_tree", PATH)
assert SPEC is not None and SPEC.loader is not None
metrics = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = metrics
SPEC.loader.exec_module(metrics)

CEILINGS = tomllib.loads(Path(__file__).with_name("language.toml").read_text())["ceilings"]


@pytest.fixture(scope="module")
def measured():
    return {name: metrics.measure(name)[0] for name in metrics.PACKAGES}


@pytest.mark.parametrize("name", metrics.LIMITS)
@pytest.mark.parametrize("package", metrics.PACKAGES)
def test_package_meets_goal_or_keeps_ceiling(measured, package, name):
    limit, figures = metrics.LIMITS[name], measured[package]
    if limit.is_met(figures):
        return
    count, ceiling = metrics.places_over_goal(figures)[name], CEILINGS[package].get(name)
    assert ceiling is not None, f"{package}: {limit.row} was at its goal of {limit.goal}; see metrics.py --list {name}"
    assert count <= ceiling, f"{package}: {limit.row}: {count} places, at most {ceiling}; see metrics.py --list {name}"


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
