"""Diagnostics on the page of a run."""

import dataclasses
import io
from pathlib import Path
from typing import Any

from dashboard_runs import write_run
from rich.console import Console
from starlette.testclient import TestClient

from skyrl_inspect.dashboard.catalog import Catalog
from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.server import make_app
from skyrl_inspect.dashboard.terminal import show
from skyrl_inspect.defaults import Defaults
from skyrl_inspect.diagnostics.rules import Diagnostic

RECORDED = Diagnostic("no-gradient", 1, 3, "Rewards are equal.", "Check them.", ("a=1",), "docs/x.md")


def ask(folder: Path, question: str, **query: str) -> Any:
    with TestClient(make_app(RunsFolder(folder), Defaults()), base_url="http://localhost") as client:
        return client.get(f"/api/{question}", params=query).json()


def test_page_shows_recorded_diagnostics(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    run.append_diagnostic(3, dataclasses.asdict(RECORDED))
    run.append_diagnostic(3, {"name": "of another release"})
    [found] = ask(tmp_path, "run", run="run")["diagnostics"]
    assert Diagnostic(**{name: found[name] for name in vars(RECORDED)} | {"settings": ("a=1",)}) == RECORDED


def test_list_contains_each_diagnostic_once(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    catalog = Catalog(RunsFolder(tmp_path), Defaults())
    assert catalog.get_row("run")["diagnostics"] == []
    for step in (3, 30):
        run.append_diagnostic(step, dataclasses.asdict(RECORDED))
    assert catalog.get_row("run")["diagnostics"] == [RECORDED.name]


def test_terminal_shows_evidence(tmp_path: Path):
    write_run(tmp_path / "run", 3).append_diagnostic(3, dataclasses.asdict(RECORDED))
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    show(tmp_path / "run", console)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert RECORDED.name in text and RECORDED.evidence in text


def test_unrecorded_diagnostics_are_computed_from_metrics(tmp_path: Path):
    run = write_run(tmp_path / "cut", 0)
    for step in range(1, 7):
        run.append_metrics(step, {"reward/avg_raw_reward": 0.5, "generate/stop_reason/length": 0.5})
    [found] = ask(tmp_path, "run", run="cut")["diagnostics"]
    assert (found["name"], found["onset"], found["step"]) == ("truncation", 1, 6) and "50%" in found["evidence"]
