"""Trajectories on disk, and looking at them."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from skyrl_agent.chat.transitions import Observation, TokensWithLogprobs, Transition
from skyrl_agent.records import TrajectoryFile, read_records, to_result
from skyrl_agent.runtimes.base import ExecResult, RuntimeSpec
from skyrl_agent.runtimes.recorded import MAX_COMMANDS, RecordedRuntime
from skyrl_agent.testing import byte_tokenizer
from skyrl_agent.types import Failure, SandboxCommand, ToolCallRecord, TrajectoryResult
from skyrl_agent.view import main


class QuietRuntime:
    """Runtime whose commands print their own number."""

    id, workdir, python, spec = "quiet", "/", "python3", RuntimeSpec()
    num_commands = 0

    async def exec(self, command: str, **settings: object) -> ExecResult:
        self.num_commands += 1
        return ExecResult("exited", 0, str(self.num_commands), "", 0.0)


async def test_command_log_reports_omitted_commands(caplog):
    log: list[SandboxCommand] = []
    runtime = RecordedRuntime(cast(Any, QuietRuntime()), log)
    for _ in range(MAX_COMMANDS):
        await runtime.exec("true")
    assert [entry.stdout for entry in log[::299]] == ["1", "300"]
    for _ in range(3):
        await runtime.exec("true")
    assert [entry.stdout for entry in log[299:]] == ["300", ""]
    assert log[-1].command == "[... 3 further commands omitted: the log records the first 300 ...]"
    evaluation = RecordedRuntime(cast(Any, QuietRuntime()), log)  # the second of the trajectory
    await evaluation.exec("true")
    assert log[-1].command.startswith("[... 4 further commands omitted") and len(log) == MAX_COMMANDS + 1
    assert caplog.text.count("does not record further ones") == 1


def result(number: int = 0, reward: float | None = 1.0, reason: str = "FINISH_TOOL") -> TrajectoryResult:
    encode = byte_tokenizer().encode
    turns = [
        Transition(Observation(encode("ask")), TokensWithLogprobs(encode("call"), [-0.5] * 4)),
        Transition(Observation(encode("askcall[tool]")), TokensWithLogprobs(encode("done"), [-0.5] * 4)),
    ]
    return TrajectoryResult(
        instance_id=f"task/{number}",
        transitions=turns,
        messages=[{"role": "user", "content": "ask [bold]"}, {"role": "assistant", "content": "done"}],
        finish_reason=reason,
        reward=reward,
        failure=None if reward is not None else Failure("initialize", "infrastructure", "no sandbox", attempts=3),
        tool_calls=[ToolCallRecord("search", {"query": "x"}, "found", 0.25, 1)],
        sandbox=[SandboxCommand("evaluate", "make test", "2 passed", "", "exited", 0, 1.5)],
        num_steps=2,
        stage_seconds={"generate": 1.5},
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three trajectories: solved, not solved, failed."""
    path = tmp_path / "folder" / "trajectories.jsonl"
    for number, (reward, reason) in enumerate([(1.0, "FINISH_TOOL"), (0.0, "FINISH"), (None, "error_runtime")]):
        TrajectoryFile(path, byte_tokenizer()).append(result(number, reward, reason))
    return path


def test_record_holds_tokens_and_their_sources(file: Path):
    first, _, failed = read_records(file)
    assert (first["instance_id"], first["reward"], first["val"]) == ("task/0", 1.0, False)
    [row] = first["rows"]
    assert row["spans"] == [[True, "call"], [False, "[tool]"], [True, "done"]]
    assert (len(row["response_ids"]), row["mask"]) == (14, [1] * 4 + [0] * 6 + [1] * 4)
    assert first["tool_calls"][0]["seconds"] == 0.25
    assert to_result(first).sandbox == result().sandbox
    del first["sandbox"]  # as earlier releases wrote it
    assert to_result(first).sandbox == []
    assert failed["failure"] == {
        "stage": "initialize",
        "kind": "infrastructure",
        "message": "no sandbox",
        "attempts": 3,
    }


def test_truncated_line_is_skipped(file: Path):
    whole = file.read_bytes()
    file.write_bytes(whole[:-50])
    TrajectoryFile(file, byte_tokenizer()).append(result(9))
    assert [record["instance_id"] for record in read_records(file)] == ["task/0", "task/1", "task/9"]


def _write_many(path: Path, writer: int) -> None:
    file = TrajectoryFile(path, byte_tokenizer())
    for number in range(20):
        file.append(result(100 * writer + number))


def test_concurrent_processes_append_whole_lines(tmp_path: Path):
    path = tmp_path / "shared.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, writer)) for writer in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    ids = {record["instance_id"] for record in read_records(path)}
    assert ids == {f"task/{100 * writer + number}" for writer in range(3) for number in range(20)}


def test_full_disk_does_not_end_batch(caplog: pytest.LogCaptureFixture):
    TrajectoryFile("/dev/full/trajectories.jsonl", byte_tokenizer()).append(result())
    assert "a trajectory was not written" in caplog.text


async def test_runner_writes_each_trajectory(runner, numbers, tmp_path: Path):
    path = tmp_path / "run.jsonl"
    await runner(output={"trajectories": str(path)}).run([*numbers(1), {"number": 2, "sandbox": "broken"}])
    records = sorted(read_records(path), key=lambda record: (record["instance_id"], record["trajectory_id"]))
    assert [record["finish_reason"] for record in records] == ["FINISH"] * 2 + ["error_runtime"] * 2
    assert records[0]["rows"][0]["spans"] == [[True, "2<|im_end|>"]]
    assert {"generate", "queue_generate"} <= set(records[0]["stage_seconds"])


@pytest.mark.parametrize(
    "options, shown",
    [
        ([], ["task/0", "task/1", "task/2", "3 trajectories, mean reward 0.5 of 2"]),
        (["--reason", "FINISH"], ["task/1", "1 trajectories"]),
        (["--min-reward", "0.5"], ["task/0", "1 trajectories"]),
        (["--failed"], ["task/2", "infrastructure: no sandbox"]),
        (["--show", "0"], ["ask [bold]", 'search 0.250 s {"query": "x"}', "| call", "  [tool]", "written 8 tokens"]),
    ],
)
def test_viewer_prints_selected_trajectories(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], shown: list[str]
):
    assert main([str(file), *options]) == 0
    printed = capsys.readouterr().out
    for text in shown:
        assert text in printed


def test_viewer_command_prints_plain_text_to_pipe(file: Path):
    command = [sys.executable, "-m", "skyrl_agent.view", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "\x1b" not in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines()[1:4]] == ["task/0", "task/1", "task/2"]
    gone = subprocess.run([*command[:-1], "no_such_file"], capture_output=True, text=True, timeout=60)
    assert (gone.returncode, gone.stderr.strip()) == (1, "no_such_file: No such file or directory")


def test_rows_are_plain_json(file: Path):
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_browser_option_starts_dashboard(tmp_path: Path, monkeypatch, capsys):
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command[1:]))
    file, other = tmp_path / "trajectories.jsonl", tmp_path / "mine.jsonl"
    for path in (file, other):
        path.write_text("")
    main([str(file), "--browser"])
    assert started == [["-m", "skyrl_train.dashboard", str(file), "--port", "0", "--open"]]
    assert main([str(other), "--browser"]) == main([str(tmp_path / "none" / file.name), "--browser"]) == 1
    said = capsys.readouterr().err
    assert "trajectories.jsonl" in said and "does not exist" in said
    assert len(started) == 1
