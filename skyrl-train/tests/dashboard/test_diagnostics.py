"""Diagnostics on the page of a run."""

import dataclasses
from pathlib import Path
from typing import Any

from dashboard_runs import write_run
from starlette.testclient import TestClient

from skyrl_inspect.dashboard.runs_folder import RunsFolder
from skyrl_inspect.dashboard.server import make_app
from skyrl_inspect.defaults import Defaults
from skyrl_inspect.diagnostics.rules import Diagnostic


def ask(folder: Path, run: str) -> list[dict[str, Any]]:
    with TestClient(make_app(RunsFolder(folder), Defaults()), base_url="http://localhost") as client:
        return client.get("/api/run", params={"run": run}).json()["diagnostics"]


def test_page_shows_recorded_diagnostics(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    recorded = Diagnostic("no-gradient", 1, 3, "Rewards are equal.", "Check them.", ("a=1",), "docs/x.md")
    run.append_diagnostic(3, dataclasses.asdict(recorded))
    run.append_diagnostic(3, {"name": "of another release"})
    [found] = ask(tmp_path, "run")
    assert Diagnostic(**{name: found[name] for name in vars(recorded)} | {"settings": ("a=1",)}) == recorded


def test_run_without_record_is_judged_by_its_metrics(tmp_path: Path):
    run = write_run(tmp_path / "cut", 0)
    for step in range(1, 7):
        run.append_metrics(step, {"reward/avg_raw_reward": 0.5, "generate/stop_reason/length": 0.5})
    [found] = ask(tmp_path, "cut")
    assert (found["name"], found["onset"], found["step"]) == ("truncation", 1, 6) and "50%" in found["evidence"]
