"""The run in a terminal: `render` draws data, the command reads a run folder."""

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dashboard_runs import HOSTILE, trajectory, write_run
from rich.console import Console

from skyrl_inspect.dashboard import terminal
from skyrl_inspect.dashboard.__main__ import main
from skyrl_inspect.dashboard.terminal import RunReader, block_curve, render, show, to_printable
from skyrl_train.utils.run_folder import RunFolder


def drawn(path: Path, width: int = 100, after: float = 0.0) -> str:
    view = RunReader(path).read_view()
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(view, view.row["updated"] + after, width))
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_run_is_drawn_with_progress_curves_failures_and_last_samples(tmp_path: Path):
    write_run(tmp_path / "adding", 2, total=10)
    text = drawn(tmp_path / "adding")
    assert "adding  running  tiny  gsm8k  seed 7" in text
    assert "step 2 of 10 (20%)  2 s a step  about 16 s left" in text.splitlines()[2]
    assert "Reward  0.2  0.1 to 0.2" in text
    assert "█" in text
    assert "step 2: 4 rows" in text
    assert "failed: 1 tool" in text
    assert text.count("tokens  stop") == 3
    assert "1_1  reward 1  2 tokens" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_terminal_and_control_characters_are_escaped(tmp_path: Path, width: int):
    run = write_run(tmp_path / "run", 3, last_record=f"ERROR   {HOSTILE}")
    run.write_trajectories(4, "train", [trajectory(HOSTILE, 0, tokens=[HOSTILE, "\n", "x" * 100_000], failed=True)])
    text = drawn(tmp_path / "run", width)
    assert max(map(len, text.splitlines())) <= width
    assert not set(text) & set(map(chr, [*range(10), *range(11, 32), 0x202E]))
    assert "failed" in text
    assert len(text) < 20_000


def test_silent_and_empty_runs_say_so(tmp_path: Path):
    RunFolder(tmp_path / "new").write_config("trainer: {run_name: new}\n")
    assert "No step has finished yet." in drawn(tmp_path / "new")
    with open(RunFolder(tmp_path / "new").metrics_path, "w") as file:
        file.write('{"step": 1, "time": 1.0, "reward/avg_raw_reward": null}\n{"step": 2, "ti')
    assert "(no number)" in drawn(tmp_path / "new")


@pytest.mark.parametrize(
    "values, width, rows, expected",
    [
        ([0.0, 1.0], 10, 1, ["▁█"]),
        ([0.0, 1.0], 10, 2, [" █", "▁█"]),
        ([2.0, 2.0, 2.0], 10, 1, ["▅▅▅"]),
        ([0.0, 0.0, 1.0, 1.0], 2, 1, ["▁█"]),  # a column is the mean of its values
        ([float(i) for i in range(8)], 8, 1, ["▁▂▃▄▅▆▇█"]),
    ],
)
def test_curve_as_blocks(values: list[float], width: int, rows: int, expected: list[str]):
    assert block_curve(values, width, rows) == expected


def test_control_characters_become_signs():
    assert to_printable("a\x1b[31m\n\u202eb\x00") == "a␛[31m\n�b␀"


def test_view_is_printed_once_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "adding", 2, total=10)
    assert main(["--terminal", str(tmp_path / "adding")]) == 0
    assert "step 2 of 10" in capsys.readouterr().out
    assert main(["--terminal", str(tmp_path)]) == 1
    assert "is not a run folder: pass the folder of trainer.run_dir; below it are adding" in capsys.readouterr().err


def test_terminal_view_follows_run_until_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = write_run(tmp_path / "adding", 1, total=2)
    seen: list[Any] = []

    def next_step(seconds: float) -> None:
        seen.append(seconds)
        run.append_metrics(2, {"reward/avg_raw_reward": 0.75})
        with open(run.log_path("trainer"), "a") as file:
            file.write("2026-01-01 00:00:02 INFO    step 2/2  reward 0.75\n")

    monkeypatch.setattr(terminal, "time", SimpleNamespace(time=time.time, sleep=next_step))
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    show(tmp_path / "adding", console)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert seen == [1.0]
    assert text.index("step 1 of 2") < text.index("step 2 of 2 (100%)")
