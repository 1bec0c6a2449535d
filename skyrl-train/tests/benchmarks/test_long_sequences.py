"""The benchmark of long sequences runs, and finds that chunks need a fraction of whole logits."""

import re
from typing import Any

import pytest


@pytest.mark.full
def test_chunks_need_less_than_a_third_of_whole_logits(run_script: Any):
    """1,024 tokens of 50,000 words: three times 0.2 GB of whole logits, chunks of 64 tokens of 0.013 GB. What both need
    besides (0.1 GB) weighs less the more tokens there are."""
    sizes = ["--tokens", "1024", "--vocabulary", "50000", "--chunk-size", "64", "--limit-gb", "2"]
    printed = run_script("benchmarks/long_sequences.py", *sizes, "--device", "cpu", "--skip-packing")
    found = re.findall(r"\| 1,024 \| ([^|]+) \| ([\d.]+) \|", printed)
    peaks = {case: float(peak) for case, peak in found}
    assert peaks["plain"] > 0.6
    assert peaks["plain"] > 3 * peaks["ours"]
