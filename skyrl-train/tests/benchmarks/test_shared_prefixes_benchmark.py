"""The benchmark of shared prefixes measures both ways."""

import re
from typing import Any

import pytest


@pytest.mark.full
def test_prompts_computed_once_take_less_time(run_script: Any):
    sizes = ["--prompts", "256", "--samples", "4", "--rounds", "1"]
    printed = run_script("benchmarks/shared_prefixes.py", *sizes, timeout=200)
    (gain,) = re.findall(r"^\| 256 .*\| ([\d.]+)x \| 2.50x \|$", printed, re.MULTILINE)
    assert float(gain) > 1.5, printed
