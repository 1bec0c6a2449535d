"""The benchmark of a GRPO step runs the real loop and says what it measured."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_two_steps_of_ours_give_a_table():
    command = [sys.executable, "benchmarks/grpo_step.py", "--steps", "1", "--warmup", "1", "--skip-trl"]
    command += ["--dtypes", "float32", "--engines", "1", "--ranks", "1"]
    finished = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    row = re.search(r"\| float32 \| ours, 1 rank \+ 1 engine \| ([\d.]+) \| ([\d.]+) \|", finished.stdout)
    assert row, finished.stdout
    samples_per_second, seconds = float(row[1]), float(row[2])
    assert samples_per_second * seconds == pytest.approx(64, rel=0.05)  # 8 prompts x 8 samples a step
    assert "timing/sync_weights" in finished.stdout
    assert "length 64.0" in finished.stdout + finished.stderr  # every answer has exactly 64 tokens
