"""The benchmark of weight sync runs, and finds that a small step changes little."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_every_strategy_brings_the_bits_and_changes_take_a_twentieth_of_the_bytes(tmp_path):
    command = [sys.executable, "benchmarks/weight_sync.py", "--megabytes", "4", "--turns", "2"]
    finished = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert "Every engine held the very bits that were sent." in finished.stdout
    found = re.findall(r"\| 4 MB \| ([^|]+) \| [\d.]+ \| [\d.]+ \| ([\d,]+) \| ([\d.]+)% \|", finished.stdout)
    shares = {strategy: float(share) for strategy, _, share in found}
    assert [shares[name] for name in ("shared_memory", "broadcast (gloo)", "checkpoint")] == [100.0] * 3
    assert 0 < shares["delta, shared_memory"] <= 5 and 0 < shares["delta, broadcast (gloo)"] <= 5
    assert re.findall(r"\| 4 MB \| (off|sampled|full) \|", finished.stdout) == ["off", "sampled", "full"]
    assert list(tmp_path.iterdir()) == []
