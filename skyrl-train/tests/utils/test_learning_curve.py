"""A run's metrics as curves and as a picture."""

from pathlib import Path

import pytest

from skyrl_train.errors import DataError
from skyrl_train.utils.learning_curve import curves, save_learning_curve_png
from skyrl_train.utils.run_folder import RunFolder


def test_last_metric_line_of_step_is_used():
    rows = [{"step": 2, "time": 5.0, "a": 1.0}, {"step": 1, "time": 6.0, "a": 3.0}, {"step": 2, "time": 7.0, "b": None}]
    assert curves([*rows, {"step": 2, "time": 8.0, "a": 2, "phase": "train"}]) == {
        "a": ([1, 2], [3.0, 2.0]),
        "b": ([2], [None]),
    }


def test_learning_curve_is_written_as_png(tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    for step in (1, 2, 3):
        run.append_metrics(step, {"reward/avg_raw_reward": step / 10})
    path = save_learning_curve_png(run.path, tmp_path / "curve.png", title="adding")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    for folder, metric in ((run.path, "loss"), (tmp_path / "absent", "reward/avg_raw_reward")):
        with pytest.raises(DataError, match=f"neither {metric} nor eval/all/avg_score"):
            save_learning_curve_png(folder, tmp_path / "none.png", training_metric=metric)
