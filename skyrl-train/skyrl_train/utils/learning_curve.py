"""Curves of a run's metrics, and a learning curve as an image for a README."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skyrl_train.errors import DataError
from skyrl_train.types import JsonObject
from skyrl_train.utils.run_folder import RunFolder

TRAINING_REWARD = "reward/avg_raw_reward"
EVALUATION_REWARD = "eval/all/avg_score"


def curves(rows: Iterable[JsonObject]) -> dict[str, tuple[list[int], list[float | None]]]:
    """Return every metric as steps and values, by step. If a step has several lines, the last one with the metric
    counts."""
    found: dict[str, dict[int, float | None]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in ("step", "time") and (value is None or isinstance(value, int | float)):
                found.setdefault(name, {})[row["step"]] = None if value is None else float(f"{value:.6g}")
    return {name: (sorted(points), [points[step] for step in sorted(points)]) for name, points in found.items()}


def save_learning_curve_png(
    run_path: str | Path,
    png_path: str | Path,
    *,
    title: str = "",
    training_metric: str = TRAINING_REWARD,
    evaluation_metric: str = EVALUATION_REWARD,
) -> Path:
    """Draw the training and evaluation reward over the steps of a run.

    Returns:
        Absolute path of the image.

    Raises:
        DataError: the run is missing, or has neither metric yet.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and only needed here
    from matplotlib.figure import Figure

    found = curves(RunFolder(run_path).read_metrics())
    if not (found.keys() & {training_metric, evaluation_metric}):
        raise DataError(
            f"{run_path} has neither {training_metric} nor {evaluation_metric} in its metrics.jsonl yet; pass the "
            "folder of trainer.run_dir, and wait until a step has finished"
        )
    figure = Figure(figsize=(8, 4), dpi=160, layout="constrained")
    axes: Any = figure.subplots()
    if training_metric in found:
        axes.plot(*found[training_metric], color="#9db8e8", linewidth=1.6, label="training (sampled)")
    if evaluation_metric in found:
        axes.plot(
            *found[evaluation_metric], color="#2457c5", linewidth=2.2, marker="o", markersize=5, label="evaluation"
        )
    axes.set(title=title, xlabel="step", ylabel="mean reward")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    FigureCanvasAgg(figure).print_png(str(png_path))
    return Path(png_path).absolute()
