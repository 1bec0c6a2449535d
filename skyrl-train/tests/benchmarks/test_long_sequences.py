"""The benchmark of long sequences runs, and finds that chunks need a fraction of whole logits."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_chunks_need_less_than_a_third_of_whole_logits():
    """1,024 tokens of 50,000 words: three times 0.2 GB of whole logits, chunks of 64 tokens of 0.013 GB. What both need
    besides (0.1 GB) weighs less the more tokens there are."""
    command = [sys.executable, "benchmarks/long_sequences.py", "--tokens", "1024", "--vocabulary", "50000"]
    command += ["--chunk-size", "64", "--limit-gb", "2", "--device", "cpu", "--skip-packing"]
    finished = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    found = re.findall(r"\| 1,024 \| ([^|]+) \| ([\d.]+) \|", finished.stdout)
    peaks = {case: float(peak) for case, peak in found}
    assert peaks["plain"] > 0.6
    assert peaks["plain"] > 3 * peaks["ours"]
