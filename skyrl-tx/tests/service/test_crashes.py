"""Killed at random moments, service and engine lose no acknowledged request and execute none twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from service_users import Chain

WORKER = Path(__file__).with_name("crash_worker.py")
NUM_SEQS = 90


@pytest.mark.process
@pytest.mark.parametrize("seed", [0])
@pytest.mark.slow
def test_kill_9_at_random_moments_changes_no_result(tmp_path: Path, seed: int):
    _kill_repeatedly(tmp_path, seed, kills=6)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 6))
def test_kill_9_at_many_random_moments_changes_no_result(tmp_path: Path, seed: int):
    _kill_repeatedly(tmp_path, seed, kills=12)


def _kill_repeatedly(folder: Path, seed: int, kills: int) -> None:
    draw = random.Random(seed)
    for _ in range(kills):
        worker = _start(folder)
        begun = _progress(folder)
        deadline = time.monotonic() + 30
        while _progress(folder) == begun and worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)  # killed before it did anything it would teach us little
        time.sleep(draw.uniform(0, 0.4))
        if worker.poll() is not None:
            break
        if draw.random() < 0.3:
            _kill_engine(worker.pid)
            time.sleep(draw.uniform(0, 0.3))
        os.kill(worker.pid, signal.SIGKILL)
        worker.communicate(timeout=10)
    else:
        worker = _start(folder)
    output, _ = worker.communicate(timeout=90)
    assert worker.returncode == 0 and "all done" in output, output[-3000:]
    for user in range(3):
        told = _told(folder / f"user{user}.jsonl")
        chain = Chain(told["finished"])
        for seq in range(1, NUM_SEQS + 1):
            if seq % 10:
                chain.step(seq) if seq % 3 == 0 else chain.train(seq, length=60, copies=150 if seq % 7 == 0 else 1)
            assert told[f"result{seq}"] == chain.state, f"user {user}, seq {seq}"


def _start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(folder), str(NUM_SEQS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _kill_engine(parent: int) -> None:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        os.kill(int(child), signal.SIGKILL)


def _progress(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("user*.jsonl"))


def _told(path: Path) -> dict:
    told = {}
    for line in path.read_text().split("\n"):
        if line.endswith("}"):
            told |= json.loads(line)
    return told
