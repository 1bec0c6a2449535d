"""The benchmark of loading runs: each model, division and way has a row, and reading in parts takes less memory."""

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.full
def test_every_model_and_way_is_measured(tmp_path: Path, run_script: Any):
    printed = run_script("benchmarks/loading.py", "--megabytes", "200", "--directory", str(tmp_path))
    pattern = r"\| (dense|experts), [\d.]+ GB \| ([^|]+) \| (each rank|rank 0) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|"
    rows = re.findall(pattern, printed)
    assert len(rows) == 2 * 3 * 2
    for whole, parts in zip(rows[::2], rows[1::2], strict=True):
        assert whole[:2] == parts[:2] and (whole[2], parts[2]) == ("rank 0", "each rank")
        if whole[1] == "FSDP2":
            assert float(parts[3]) < float(whole[3])
    assert list(tmp_path.iterdir()) == []
