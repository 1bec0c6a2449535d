"""Expected bands of a run's curves: read from a recipe's file, compared with every step, made from reference runs.

A band file (`trainer.curve_bands`) is YAML: the source of the numbers, and for each metric the lowest and highest
expected value at some steps. Between two steps the bounds are interpolated, outside of them nothing is expected:

    source: three seeds of examples/quickstart/run.py
    bands:
      reward/avg_raw_reward:
        1: [0.05, 0.25]
        30: [0.90, 1.00]

`python -m skyrl_train.curve_bands RUN... --metrics NAME...` prints such a file for finished runs.
"""

import argparse
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev, variance
from typing import cast

import yaml
from loguru import logger

from skyrl_train.config import SkyRLConfig
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.hooks import ObservedRun, TrainerHook
from skyrl_train.types import JsonObject
from skyrl_train.utils.run_folder import RunFolder

Metrics = Mapping[str, float | None]

PATIENCE, EVALUATION_PATIENCE = 5, 2
"""Consecutive values outside of a band before a warning: single training steps are noisy, evaluations less so."""


@dataclass(frozen=True)
class CurveBand:
    """Expected range of one metric over the training steps."""

    metric: str
    points: tuple[tuple[int, float, float], ...]
    """(step, lowest, highest expected value), by step."""

    @property
    def patience(self) -> int:
        """Consecutive values outside of the band that are worth a warning."""
        return EVALUATION_PATIENCE if self.metric.startswith("eval/") else PATIENCE

    def interpolate_at(self, step: int) -> tuple[float, float] | None:
        """Interpolate the bounds at a step linearly. None before the first point and after the last one."""
        steps = [point[0] for point in self.points]
        after = bisect_left(steps, step)
        if after == len(steps) or (after == 0 and steps[0] != step):
            return None
        right, *right_bounds = self.points[after]
        left, *left_bounds = self.points[max(0, after - 1)]
        weight = 1.0 if right == left else (step - left) / (right - left)
        low, high = (a + weight * (b - a) for a, b in zip(left_bounds, right_bounds, strict=True))
        return low, high


@dataclass(frozen=True)
class ExpectedCurves:
    """Content of a band file."""

    bands: tuple[CurveBand, ...]
    source: str
    """Origin of the numbers."""
    name: str
    """Name of the file."""


class CurveBands(TrainerHook):
    """Hook that compares the metrics of each step with the bands of `trainer.curve_bands`, if that is set."""

    def __init__(self, run: ObservedRun):
        super().__init__(run)
        bands = run.cfg.trainer.curve_bands
        self._watch = None if bands is None else CurveWatch(read_bands(bands))

    @classmethod
    def check_settings(cls, cfg: SkyRLConfig) -> None:
        """Read the file of bands. Raises ConfigError."""
        if cfg.trainer.curve_bands is not None:
            read_bands(cfg.trainer.curve_bands)

    def on_resume(self) -> None:
        """Restore the values that were outside of their bands."""
        if self._watch is not None:
            self._watch.replay(self.run.run_folder.read_metrics())

    def on_log(self) -> None:
        """Add the expected bounds to the metrics, and warn about metrics that leave them."""
        if self._watch is not None:
            self.run.all_metrics |= self._watch.observe(self.run.global_step, self.run.all_metrics)


class CurveWatch:
    """Comparison of a running job with the expected curves of its recipe."""

    def __init__(self, expected: ExpectedCurves):
        self._bands = expected.bands
        self._origin = f"{expected.name}: {expected.source}"
        self._outside: dict[str, list[tuple[int, str]]] = {band.metric: [] for band in expected.bands}
        """Latest consecutive values outside of the band by metric: step and side ("below", "above") of each."""

    def replay(self, rows: Iterable[JsonObject]) -> None:
        """Restore the state from the metrics of earlier steps: a resumed run warns as an uninterrupted one."""
        for row in rows:
            self._update(row["step"], row)

    def observe(self, step: int, metrics: Metrics) -> dict[str, float | None]:
        """Compare the metrics of a step with the bands; warn once when a metric has left its band for several
        values (`CurveBand.patience`) or is outside at its last point, and when it is back.

        Returns: `expected/<metric>/low` and `/high`, and `expected/<metric>/outside`: -1 below the band, 1 above it,
            0 within.
        """
        for message in self._update(step, metrics):
            logger.warning(message)
        expected = {}
        for band, low, high, value in self._iter_comparable(step, metrics):
            side = -1.0 if not value >= low else float(value > high)  # NaN counts as below
            expected |= {f"expected/{band.metric}/low": low, f"expected/{band.metric}/high": high}
            expected[f"expected/{band.metric}/outside"] = side
        return expected

    def _iter_comparable(self, step: int, metrics: Metrics) -> Iterable[tuple[CurveBand, float, float, float]]:
        for band in self._bands:
            value, bounds = metrics.get(band.metric), band.interpolate_at(step)
            if value is not None and bounds is not None:
                yield band, *bounds, value

    def _update(self, step: int, metrics: Metrics) -> list[str]:
        messages = []
        for band, low, high, value in self._iter_comparable(step, metrics):
            before = self._outside[band.metric]
            side = "below" if not value >= low else "above" if value > high else None
            now = [] if side is None else [*(before if before and before[-1][1] == side else []), (step, side)]
            self._outside[band.metric] = now
            expected = f"{value:.4g}, expected {low:.4g} to {high:.4g} at step {step} ({self._origin})"
            is_last = step == band.points[-1][0] and len(now) < band.patience
            if now and (len(now) == band.patience or is_last):
                messages.append(f"{band.metric} is {side} the expected band since step {now[0][0]}: {expected}")
            elif len(before) >= band.patience and not now:
                messages.append(f"{band.metric} is back in the expected band: {expected}")
        return messages


def read_bands(path: str) -> ExpectedCurves:
    """Read a band file.

    Raises:
        ConfigError: the file is missing or malformed; names the entry.
    """
    setting = f"trainer.curve_bands={path}"
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text())
    except FileNotFoundError:
        raise ConfigError(f"{setting}: no such file. Bands of recipes are at examples/recipes/*/bands/*.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{setting} cannot be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("bands"), dict) or not content["bands"]:
        raise ConfigError(f"{setting} needs `source: TEXT` and `bands:` with metric -> step -> [lowest, highest]")
    if not isinstance(content.get("source"), str):
        raise ConfigError(f"{setting} needs `source: TEXT`, the origin of its numbers")
    bands = tuple(_parse_band(str(metric), points, setting) for metric, points in content["bands"].items())
    return ExpectedCurves(bands, content["source"].strip(), Path(path).name)


def _parse_band(metric: str, points: object, setting: str) -> CurveBand:
    if not isinstance(points, dict) or not points:
        raise ConfigError(f"{setting}: bands.{metric} must be step: [lowest, highest] lines; got {points!r:.100}")
    found = []
    for step, bounds in points.items():
        where = f"{setting}: bands.{metric}.{step}"
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ConfigError(f"{where}: a step must be an integer, 0 or greater")
        if not isinstance(bounds, list) or len(bounds) != 2 or not all(_is_number(bound) for bound in bounds):
            raise ConfigError(f"{where} must be [lowest, highest], two finite numbers; got {bounds!r:.100}")
        low, high = cast("list[float]", bounds)
        if low > high:
            raise ConfigError(f"{where}: the lowest value {low} is above the highest {high}")
        found.append((step, float(low), float(high)))
    return CurveBand(metric, tuple(sorted(found)))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def compute_bands(
    runs: Sequence[Sequence[JsonObject]], metrics: Sequence[str], interval: int, width: float = 2.0, pool: bool = False
) -> dict[str, dict[int, list[float]]]:
    """Compute bands from the metrics of reference runs: mean -+ `width` standard deviations over runs (sample standard
    deviation) of the means over `interval` steps, placed at the middle of each interval's steps.

    Args:
        pool: use one deviation for all intervals of a metric, their root mean square. With two or three runs, the
            deviation of a single interval is unreliable.

    Raises:
        DataError: fewer than two runs, or a metric that one of them lacks.
    """
    if len(runs) < 2:
        raise DataError("a band needs at least two runs with different seeds")
    bands: dict[str, dict[int, list[float]]] = {}
    for metric in metrics:
        means = [_compute_interval_means(rows, metric, interval) for rows in runs]
        steps = sorted(set.intersection(*(set(of_run) for of_run in means)))
        if not steps:
            raise DataError(f"not every run has {metric}; the metrics of the first: {', '.join(_list_names(runs[0]))}")
        bands[metric] = {}
        values_of = {step: [of_run[step] for of_run in means] for step in steps}
        pooled = math.sqrt(fmean(variance(values) for values in values_of.values()))
        for step, values in values_of.items():
            centre, spread = fmean(values), width * (pooled if pool else stdev(values))
            bands[metric][step] = [round(centre - spread, 6), round(centre + spread, 6)]
    return bands


def _compute_interval_means(rows: Sequence[JsonObject], metric: str, interval: int) -> dict[int, float]:
    """Return the means of a metric over consecutive intervals, by the step in the middle of each."""
    values = {row["step"]: row[metric] for row in rows if isinstance(row.get(metric), int | float)}
    if not values:
        return {}
    edges = range(min(values), max(values) + interval + 1, interval)
    parts = [[step for step in sorted(values) if start <= step < end] for start, end in pairwise(edges)]
    return {part[len(part) // 2]: fmean(values[step] for step in part) for part in parts if part}


def _list_names(rows: Sequence[JsonObject]) -> list[str]:
    return sorted({name for row in rows for name in row} - {"step", "time"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a band file made from reference runs."""
    parser = argparse.ArgumentParser(prog="python -m skyrl_train.curve_bands", description=main.__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders with the same settings and different seeds"
    )
    parser.add_argument("--metrics", nargs="+", default=["reward/avg_raw_reward"], metavar="NAME")
    parser.add_argument("--interval", type=int, default=5, help="number of steps to average over (default: 5)")
    parser.add_argument(
        "--width", type=float, default=2.0, help="width of the band in standard deviations on each side (default: 2)"
    )
    parser.add_argument(
        "--pool", action="store_true", help="use one standard deviation for all steps of a metric, for few runs"
    )
    parser.add_argument("--source", help="description of the data's origin (default: the folders)")
    options = parser.parse_args(arguments)
    rows = [RunFolder(run).read_metrics() for run in options.runs]
    source = options.source or ", ".join(str(run) for run in options.runs)
    bands = compute_bands(rows, options.metrics, options.interval, options.width, options.pool)
    print(yaml.safe_dump({"source": source, "bands": bands}, sort_keys=False, default_flow_style=None), end="")


if __name__ == "__main__":
    main()
