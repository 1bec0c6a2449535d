"""`python -m skyrl_train.explain` on folders that are none, ended, copied, of another machine, or cannot be written."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_gym import waits
from skyrl_gym.waits import end_run, read_records, waiting
from skyrl_inspect.explain.__main__ import main
from skyrl_inspect.explain.evidence import ELSEWHERE, GONE, observe
from skyrl_train.utils.explanations import start_recording_waits

HANGS = """
import sys, time
from pathlib import Path
from skyrl_gym.waits import waiting
from skyrl_train.utils.explanations import start_recording_waits
start_recording_waits(Path(sys.argv[1]))
with waiting("phase generate"), waiting("the reply", on="http://judge:1/v1"):
    print("ready", flush=True); time.sleep(60)
"""


@pytest.fixture
def hanging_run(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits for a judge, as the trainer of the run in `tmp_path / "run"`."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HANGS, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


def test_folder_without_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "is not a run folder: it has neither config.yaml nor waits" in capsys.readouterr().err


def test_finished_run_shows_log_tail(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("this run is finished")
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().err
    assert "records waits: the run has ended" in shown
    assert shown.endswith("this run is finished\n")
    assert not (tmp_path / "explanations").exists()


def test_live_run_is_explained_with_stacks_in_text_and_json(
    hanging_run: "subprocess.Popen[bytes]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main([str(tmp_path / "run"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cause"] == "no reply from http://judge:1/v1"
    [process] = shown["processes"]
    assert (process["role"], process["pid"]) == ("trainer", hanging_run.pid)
    assert process["state"] in ("R", "S")
    assert any('File "<string>", line 8 in <module>' in frames for frames in process["stacks"].values())
    assert hanging_run.poll() is None
    [text] = (tmp_path / "run" / "explanations").glob("*.txt")
    assert "1. no reply from http://judge:1/v1." in text.read_text()
    assert main([str(tmp_path / "run")]) == 0
    assert len(list((tmp_path / "run" / "explanations").glob("*.txt"))) == 2, "one of the same second stays"


def test_killed_run_shows_last_waits_until_next_start(
    hanging_run: "subprocess.Popen[bytes]",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    hanging_run.kill()
    hanging_run.wait()
    assert main([str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "No process of this run is alive: it was killed" in shown
    assert f"1. trainer (pid {hanging_run.pid}) is dead; its last wait: the reply, waiting for http://judge" in shown
    start_recording_waits(tmp_path / "run")
    assert [record.facts["pid"] for record in read_records(tmp_path / "run" / "waits")] == [os.getpid()]
    end_run()
    assert not (tmp_path / "run" / "waits").exists()


def test_copied_folder_names_original_and_signals_no_process(
    hanging_run: "subprocess.Popen[bytes]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    hanging_run.send_signal(signal.SIGSTOP)
    assert main([str(tmp_path / "copy")]) == 0
    shown = capsys.readouterr().out
    assert f"This folder is a copy of {tmp_path / 'run'}" in shown
    assert "1. no reply from http://judge:1/v1." in shown
    assert observe(tmp_path / "copy").processes[0].state == ELSEWHERE


def test_process_of_other_machine_is_shown_with_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with monkeypatch.context() as there:
        there.setattr("socket.gethostname", lambda: "node-7")
        start_recording_waits(tmp_path)
    with waiting("the next group"):
        assert main([str(tmp_path)]) == 0
    assert "on node-7, another host" in capsys.readouterr().out
    end_run()


def test_read_only_folder_is_explained_on_console(
    hanging_run: "subprocess.Popen[bytes]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "run" / "explanations").write_text("a file in its place")
    assert main([str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert "1. no reply from http://judge:1/v1." in captured.out
    assert "the run folder is not writable" in captured.err


def test_process_without_handler_is_not_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The signal would end it."""
    start_recording_waits(tmp_path)
    monkeypatch.setattr(waits, "SIGNAL", signal.SIGRTMAX)
    waits.add_facts(signal=int(signal.SIGRTMAX))
    [process] = observe(tmp_path).processes
    assert process.no_stacks == "it does not handle the signal that requests stacks"
    assert process.state != GONE
    end_run()
