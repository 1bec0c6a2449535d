"""The benchmark of a GRPO step runs the real loop and says what it measured."""

import re
from typing import Any

import pytest


@pytest.mark.full
def test_two_steps_give_table(run_script: Any):
    options = ["--steps", "1", "--warmup", "1", "--skip-trl", "--dtypes", "float32", "--engines", "1", "--ranks", "1"]
    printed = run_script("benchmarks/grpo_step.py", *options)
    for schedule in ("on policy", "one step off policy"):
        row = re.search(rf"\| float32 \| ours, {schedule}, 1 rank \+ 1 engine \| ([\d.]+) \| ([\d.]+) \|", printed)
        assert row, printed
        samples_per_second, seconds = float(row[1]), float(row[2])
        assert samples_per_second * seconds == pytest.approx(64, rel=0.05)  # 8 prompts x 8 samples a step
    assert "timing/sync_weights" in printed
    assert "length 64.0" in printed  # every answer has exactly 64 tokens
