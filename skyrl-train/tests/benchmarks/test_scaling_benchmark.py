"""The benchmark of scaling runs and measures what it says."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full


def test_more_layers_cost_more(run_script: Any, tmp_path: Path):
    picture = tmp_path / "scaling.png"
    options = ["--steps", "1", "--sweeps", "layers", "--skip-ranks", "--picture", str(picture)]
    printed = run_script("benchmarks/scaling.py", *options)
    rows = [row.split("|")[1:] for row in printed.splitlines() if row.startswith("| layers")]
    assert [int(row[1]) for row in rows] == [4, 8, 16]
    assert float(rows[2][4]) > float(rows[0][4]) > 0  # seconds of training
    assert picture.read_bytes().startswith(b"\x89PNG")
