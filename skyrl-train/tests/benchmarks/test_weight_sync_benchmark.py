"""The benchmark of weight sync runs, and finds that a small step changes little."""

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.full
def test_strategies_transfer_exact_bits_and_delta_is_small(tmp_path: Path, run_script: Any):
    sizes = ["--megabytes", "4", "--turns", "2"]
    printed = run_script("benchmarks/weight_sync.py", *sizes, "--directory", str(tmp_path))
    assert "Every engine held exactly the bits that were sent." in printed
    found = re.findall(r"\| 4 MB \| ([^|]+) \| [\d.]+ \| [\d.]+ \| ([\d,]+) \| ([\d.]+)% \|", printed)
    shares = {strategy: float(share) for strategy, _, share in found}
    assert [shares[name] for name in ("shared_memory", "broadcast (gloo)", "checkpoint")] == [100.0] * 3
    assert 0 < shares["delta, shared_memory"] <= 5 and 0 < shares["delta, broadcast (gloo)"] <= 5
    assert re.findall(r"\| 4 MB \| (off|sampled|full) \|", printed) == ["off", "sampled", "full"]
    assert list(tmp_path.iterdir()) == []
