"""The benchmark of shared prefixes measures both ways."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_prompts_computed_once_take_less_time():
    command = [sys.executable, "benchmarks/shared_prefixes.py", "--prompts", "256", "--samples", "4", "--rounds", "1"]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=200).stdout
    (gain,) = re.findall(r"^\| 256 .*\| ([\d.]+)x \| 2.50x \|$", printed, re.MULTILINE)
    assert float(gain) > 1.5, printed
