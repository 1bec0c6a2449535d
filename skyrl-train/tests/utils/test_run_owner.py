"""A run's folder has one driver at a time, with locks and without, and a killed driver blocks nobody."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.supervised import PreferenceConfig, SupervisedConfig
from skyrl_train.config.validation import validate_generator_cfg
from skyrl_train.entrypoints import main_sft
from skyrl_train.entrypoints.main_base import run_experiment
from skyrl_train.entrypoints.main_generate import EvalOnlyEntrypoint
from skyrl_train.errors import ConfigError
from skyrl_train.utils import run_owner
from skyrl_train.utils.run_owner import LOCK, RECORD, acquire_run
from skyrl_train_testing.tiny_runs import make_tiny_run

DRIVER = """
import sys
from skyrl_train.utils.run_owner import acquire_run
with acquire_run(*sys.argv[1:]):
    print("owned", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_driver(*folders: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the folders until it is ended."""
    command = [sys.executable, "-c", DRIVER, *map(str, folders)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "owned\n"
            yield process
        finally:
            process.kill()


def write_record(folder: Path, **changes: Any) -> Path:
    """Write the record of a driver that runs on another host, or of `changes`."""
    (folder / LOCK).touch()
    record = {"host": "elsewhere", "pid": 123, "start": 9, "began": "2026-01-01 00:00:00"}
    path = folder / RECORD
    path.write_text(json.dumps(record | {"lock": (folder / LOCK).stat().st_ino} | changes))
    return path


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_second_driver_error_names_host_and_process(tmp_path: Path):
    with other_driver(tmp_path) as process:
        with pytest.raises(ConfigError) as error, acquire_run(tmp_path):
            pass
        for part in ("trainer.run_dir", str(tmp_path), os.uname().nodename, f"process {process.pid}"):
            assert part in str(error.value)
    with acquire_run(tmp_path), acquire_run(tmp_path):  # killed: free at once; in one process it nests
        assert json.loads((tmp_path / RECORD).read_text())["pid"] == os.getpid()
    assert not (tmp_path / RECORD).exists()


def test_external_checkpoint_folder_is_owned(tmp_path: Path):
    with other_driver(tmp_path / "one", tmp_path / "ckpts"):
        with pytest.raises(ConfigError, match=r"trainer\.ckpt_path"), acquire_run(tmp_path / "two", tmp_path / "ckpts"):
            pass
        with acquire_run(tmp_path / "two", "s3://bucket/ckpts"):  # not locked there (docs/checkpoints.md)
            pass
        with acquire_run(tmp_path / "two", tmp_path / "two" / "ckpts"):
            assert not (tmp_path / "two" / "ckpts").exists()


@pytest.mark.usefixtures("without_locks")
def test_driver_of_same_host_is_rejected_without_locks(tmp_path: Path):
    (tmp_path / "live").mkdir()
    with other_driver(tmp_path / "live") as process:
        with pytest.raises(ConfigError, match=f"process {process.pid}"), acquire_run(tmp_path / "live"):
            pass
        shutil.copytree(tmp_path / "live", tmp_path / "copy")
        with acquire_run(tmp_path / "copy"):  # the copy of a folder belongs to nobody
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with acquire_run(tmp_path / "live"):
            pass


def test_driver_of_other_host_is_rejected_while_heartbeat_is_fresh(tmp_path: Path):
    record = write_record(tmp_path)
    stop = threading.Event()
    beating = threading.Thread(target=lambda: [os.utime(record) for _ in iter(lambda: stop.wait(0.05), True)])
    beating.start()
    try:
        with pytest.raises(ConfigError, match="elsewhere"), acquire_run(tmp_path):
            pass
    finally:
        stop.set()
        beating.join()


def test_stale_driver_of_other_host_is_replaced(tmp_path: Path, log: list[str], monkeypatch: pytest.MonkeyPatch):
    record = write_record(tmp_path)
    long_ago = time.time() - run_owner.STALE_SECONDS - 1
    os.utime(record, (long_ago, long_ago))
    with acquire_run(tmp_path):  # at once
        assert json.loads(record.read_text())["pid"] == os.getpid()
    assert any("elsewhere" in line for line in log)
    monkeypatch.setattr(run_owner, "STALE_SECONDS", 0.3)
    record = write_record(tmp_path)  # touched just now: waited for
    with acquire_run(tmp_path):
        assert json.loads(record.read_text())["pid"] == os.getpid()


def test_owner_updates_record_timestamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_owner, "HEARTBEAT_SECONDS", 0.02)
    with acquire_run(tmp_path):
        record = tmp_path / RECORD
        os.utime(record, (1, 1))
        deadline = time.monotonic() + 10
        while record.stat().st_mtime == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert record.stat().st_mtime > 1


def test_commands_reject_owned_folder(tmp_path: Path, chat_model: str, capfd: pytest.CaptureFixture[str]):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")  # unread: the folder is refused first
    changes: dict[str, Any] = {"data": {"val_data": [str(rows)]}}
    settings = make_tiny_run(tmp_path / "run", chat_model, str(rows), changes)
    supervised = {
        "data": {"train_data": [str(rows)], "val_data": []},
        "trainer": {"run_dir": str(tmp_path / "run"), "policy": {"model": {"path": chat_model}}},
    }
    asynchronous = {"trainer": {"placement": {"colocate_all": False}, "fully_async": {"enabled": True}}}
    commands = [
        lambda: run_experiment(SkyRLConfig.from_dict(settings)),
        lambda: run_experiment(
            SkyRLConfig.from_dict(make_tiny_run(tmp_path / "run", chat_model, str(rows), changes | asynchronous))
        ),
        lambda: run_experiment(SkyRLConfig.from_dict(settings), EvalOnlyEntrypoint, validate_generator_cfg),
        lambda: main_sft.start(DictConfig(supervised), SupervisedConfig),
        lambda: main_sft.start(DictConfig(supervised), PreferenceConfig),
    ]
    with other_driver(tmp_path / "run") as process:
        before = sorted(tmp_path.rglob("*"))
        for command in commands:
            with pytest.raises(SystemExit):
                command()
            assert f"process {process.pid}" in capfd.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
