"""The benchmark of loading runs: each model, division and way has a row, and reading in parts takes less memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_every_model_and_way_is_measured(tmp_path: Path):
    finished = subprocess.run(
        [sys.executable, "benchmarks/loading.py", "--megabytes", "200", "--directory", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    pattern = r"\| (dense|experts), [\d.]+ GB \| ([^|]+) \| (each rank|rank 0) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|"
    rows = re.findall(pattern, finished.stdout)
    assert len(rows) == 2 * 3 * 2
    for whole, parts in zip(rows[::2], rows[1::2], strict=True):
        assert whole[:2] == parts[:2] and (whole[2], parts[2]) == ("rank 0", "each rank")
        if whole[1] == "FSDP2":
            assert float(parts[3]) < float(whole[3])
    assert list(tmp_path.iterdir()) == []
