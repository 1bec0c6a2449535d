"""The benchmark of checkpoints runs: each place and way has a row."""

import re
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.full
def test_every_place_and_way_is_measured(tmp_path: Path, run_script: Any):
    printed = run_script("benchmarks/checkpoints.py", "--megabytes", "100", "--directory", str(tmp_path))
    rows = re.findall(r"\| (disk|object store) \| (at once|beside the training) \| ([\d.]+) \| ([\d.]+) \|", printed)
    assert [row[:2] for row in rows] == [
        (place, way) for place in ("disk", "object store") for way in ("at once", "beside the training")
    ]
    assert all(float(waits) <= float(complete) for _, _, waits, complete in rows)
    assert list(tmp_path.iterdir()) == []
