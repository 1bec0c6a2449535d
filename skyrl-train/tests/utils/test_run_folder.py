import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from loguru import logger

from skyrl_train.errors import ConfigError, DataError
from skyrl_train.utils.run_folder import RunFolder, link_logs


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def warnings_logged():
    messages: list[str] = []
    handler = logger.add(lambda message: messages.append(message.record["message"]), level="WARNING")
    yield messages
    logger.remove(handler)


def without_time(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "time"} for row in rows]


def test_reading_run_creates_no_files(run: RunFolder):
    assert run.read_metrics() == []
    assert run.list_trajectory_files() == []
    assert not run.path.exists()


def test_metrics_are_read_with_step_and_time(run: RunFolder):
    before = time.time()
    run.append_metrics(1, {"reward/avg": np.float32(0.5), "loss": torch.tensor(-0.25), "phase": "train", "count": 3})
    [row] = run.read_metrics()
    assert before - 0.01 <= row.pop("time") <= time.time() + 0.01
    assert row == {"step": 1, "reward/avg": 0.5, "loss": -0.25, "phase": "train", "count": 3}


def test_nan_is_stored_as_null_and_warned_once_per_metric(run: RunFolder, warnings_logged: list[str]):
    run.append_metrics(1, {"loss": float("nan"), "kl": 1.0})
    run.append_metrics(2, {"loss": float("inf"), "kl": torch.tensor(float("nan"))})
    assert without_time(run.read_metrics()) == [
        {"step": 1, "loss": None, "kl": 1.0},
        {"step": 2, "loss": None, "kl": None},
    ]
    assert [message.split()[0] for message in warnings_logged] == ["loss", "kl"]


def test_metric_must_be_scalar_with_unreserved_name(run: RunFolder):
    with pytest.raises(TypeError, match="metric lengths"):
        run.append_metrics(1, {"lengths": [1, 2]})
    with pytest.raises(ValueError, match=r"\['step'\]"):
        run.append_metrics(1, {"step": 2})
    assert run.read_metrics() == []


def test_torn_last_line_is_ignored_and_next_line_is_intact(run: RunFolder):
    run.append_metrics(1, {"loss": 1.0})
    with open(run.metrics_path, "a") as file:
        file.write('{"step": 2, "lo')
    assert without_time(run.read_metrics()) == [{"step": 1, "loss": 1.0}]
    run.append_metrics(2, {"loss": 2.0})
    assert without_time(run.read_metrics()) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


def test_corrupt_middle_line_is_named_in_error(run: RunFolder):
    run.append_metrics(1, {"loss": 1.0})
    with open(run.metrics_path, "a") as file:
        file.write("oops\n")
    run.append_metrics(3, {"loss": 3.0})
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        run.read_metrics()


def write_steps(run: RunFolder, steps: range) -> None:
    for step in steps:
        run.append_metrics(step, {"loss": step / 10})
        run.write_trajectories(step, "train", [{"uid": f"prompt {step}"}])
        if step % 2 == 0:
            run.write_trajectories(step, "eval", [{"uid": f"question {step}"}])


def contents(run: RunFolder) -> dict[str, bytes]:
    return {file.path.name: file.path.read_bytes() for file in run.list_trajectory_files()}


def test_run_resumed_from_step_2_equals_uninterrupted_run(tmp_path: Path):
    whole, resumed = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "resumed")
    write_steps(whole, range(1, 6))
    write_steps(resumed, range(1, 5))
    (resumed.trajectories_folder / ".train_step_000005.jsonl.00000000.partial").write_text("hal")
    resumed.delete_after(2)
    assert [row["step"] for row in resumed.read_metrics()] == [1, 2]
    write_steps(resumed, range(3, 6))
    assert without_time(resumed.read_metrics()) == without_time(whole.read_metrics())
    assert contents(resumed) == contents(whole)
    assert set(os.listdir(resumed.trajectories_folder)) == set(os.listdir(whole.trajectories_folder))


def test_truncating_empty_run_does_nothing(run: RunFolder):
    run.delete_after(0)
    assert not run.path.exists()


def test_trajectories_are_listed_by_step_as_numbers(run: RunFolder):
    for step in (1_000_000, 999_999, 7):
        run.write_trajectories(step, "train", [{"reward": 1.0}])
    run.write_trajectories(7, "eval", [])
    assert [(file.step, file.phase) for file in run.list_trajectory_files()] == [
        (7, "eval"),
        (7, "train"),
        (999_999, "train"),
        (1_000_000, "train"),
    ]
    assert run.trajectories_path(12, "train").name == "train_step_000012.jsonl"


def test_oldest_training_steps_are_deleted_and_evaluations_kept(run: RunFolder):
    for step in (1, 2, 3, 4):
        run.write_trajectories(step, "train", [{"reward": 1.0}])
        run.write_token_columns(step, [{"uid": "1"}])
    run.write_trajectories(1, "eval", [{"reward": 1.0}] * 99)
    of_a_step = run.trajectories_path(1, "train").stat().st_size + run.token_columns_path(1).stat().st_size
    for max_bytes, kept in [(4 * of_a_step, [1, 2, 3, 4]), (4 * of_a_step - 1, [2, 3, 4]), (0, [4])]:
        run.delete_oldest_trajectories(max_bytes)
        assert [file.step for file in run.list_trajectory_files() if file.phase == "train"] == kept
        assert len(list(run.trajectories_folder.glob("*_tokens.jsonl"))) == len(kept)
        assert run.trajectories_path(1, "eval").exists()


def test_compressed_trajectories_are_smaller_and_read_alike(tmp_path: Path):
    rows = [{"uid": str(number), "tokens": {"ids": [number, 7] * 99}} for number in range(9)]
    plain, compressed = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b", compress=True)
    for run in (plain, compressed):
        run.write_trajectories(1, "train", rows)
        run.write_token_columns(1, rows)
    assert sorted(os.listdir(compressed.trajectories_folder)) == [
        "train_step_000001.jsonl.gz",
        "train_step_000001_tokens.jsonl.gz",
    ]
    assert compressed.read_trajectories(1, "train") == plain.read_trajectories(1, "train") == rows
    for path in ("trajectories_path", "token_columns_path"):
        [old, new] = (getattr(run, path)(*[1, "train"][: 1 + ("traj" in path)]) for run in (plain, compressed))
        assert gzip.decompress(new.read_bytes()) == old.read_bytes() and 3 * new.stat().st_size < old.stat().st_size
    other = RunFolder(compressed.path)  # the setting was changed: nothing is there twice
    other.write_trajectories(1, "train", rows[:1])
    assert [file.path.name for file in other.list_trajectory_files()] == ["train_step_000001.jsonl"]
    assert other.read_trajectories(1, "train") == rows[:1]
    compressed.delete_after(0)
    assert os.listdir(compressed.trajectories_folder) == []


def test_damaged_compressed_file_is_named(tmp_path: Path):
    run = RunFolder(tmp_path, compress=True)
    run.write_trajectories(1, "train", [{"uid": str(number)} for number in range(1000)])
    path = run.trajectories_path(1, "train")
    for damaged in (path.read_bytes()[:-20], b"no gzip"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"train_step_000001\.jsonl\.gz"):
            run.read_trajectories(1, "train")


def test_trajectory_text_and_numbers_round_trip_as_json(run: RunFolder):
    text = "line\nfeed \u2028 \x00 half a pair \udc80 日本 </script>"
    rows = [
        {"response": text, "tokens": {"log_probs": [-0.5, float("-inf")]}},
        {"response": "", "tokens": {"log_probs": None}},
    ]
    run.write_trajectories(3, "eval", rows)
    read = run.read_trajectories(3, "eval")
    assert read[0]["response"] == text
    assert [row["tokens"]["log_probs"] for row in read] == [[-0.5, None], None]
    assert "日本" in run.trajectories_path(3, "eval").read_text()  # readable with a pager


def test_config_is_saved(run: RunFolder):
    run.write_config("trainer:\n  seed: 1\n")
    assert run.config_path.read_text() == "trainer:\n  seed: 1\n"


def test_changed_configs_of_earlier_starts_are_kept(run: RunFolder):
    for seed in (1, 1, 2, 3, 3):
        run.write_config(f"seed: {seed}\n")
    kept = {path.name: path.read_text() for path in run.path.iterdir()}
    assert kept == {"config_1.yaml": "seed: 1\n", "config_2.yaml": "seed: 2\n", "config.yaml": "seed: 3\n"}


WRITER = """
import sys
from skyrl_train.utils.run_folder import RunFolder, link_logs
run = RunFolder(sys.argv[1])
for step in range(10**6):
    run.append_metrics(step, {"loss": 0.5})
    run.write_trajectories(step, "train", [{"uid": "a", "text": "x" * 10_000}])
    print(step, flush=True)
"""


@pytest.mark.slow
def test_killed_run_keeps_all_reported_steps(tmp_path: Path):
    for attempt in range(5):
        run = RunFolder(tmp_path / str(attempt))
        with subprocess.Popen([sys.executable, "-c", WRITER, run.path], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout
            steps_told = [writer.stdout.readline() for _ in range(10 + attempt)]
            writer.kill()
            steps_told += writer.stdout.readlines()
        told = int(steps_told[-1])
        assert [row["step"] for row in run.read_metrics()][: told + 1] == list(range(told + 1))
        assert all(run.read_trajectories(step, "train")[0]["uid"] == "a" for step in range(told + 1))
        run.delete_after(4)
        assert sorted(path.name for path in run.path.rglob("*") if path.is_file()) == [
            "metrics.jsonl",
            *(f"train_step_{step:06d}.jsonl" for step in range(5)),
        ]
        assert [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()] == list(range(5))


def test_logs_are_linked_to_another_folder(tmp_path: Path):
    run, logs = RunFolder(tmp_path / "run"), tmp_path / "logs" / "run"
    for _ in range(2):  # a resumed run finds its link
        link_logs(run, logs)
    run.log_path("trainer").write_text("line")
    assert (logs / run.log_path("trainer").name).read_text() == "line"
    with pytest.raises(ConfigError, match=r"trainer\.log_path"):
        link_logs(run, tmp_path / "elsewhere")
    shutil.rmtree(logs)
    link_logs(run, tmp_path / "elsewhere")  # nothing is there any more
    assert run.logs_folder.resolve() == tmp_path / "elsewhere"
