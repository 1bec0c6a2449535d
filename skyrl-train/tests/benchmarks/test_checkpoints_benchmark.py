"""The benchmark of checkpoints runs: each place and way has a row."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.full
def test_every_place_and_way_is_measured(tmp_path: Path):
    finished = subprocess.run(
        [sys.executable, "benchmarks/checkpoints.py", "--megabytes", "100", "--directory", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    rows = re.findall(
        r"\| (disk|object store) \| (at once|beside the training) \| ([\d.]+) \| ([\d.]+) \|", finished.stdout
    )
    assert [row[:2] for row in rows] == [
        (place, way) for place in ("disk", "object store") for way in ("at once", "beside the training")
    ]
    assert all(float(waits) <= float(complete) for _, _, waits, complete in rows)
    assert list(tmp_path.iterdir()) == []
