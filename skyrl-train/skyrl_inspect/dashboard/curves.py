"""Curves of a run: `metrics.jsonl` as columns that grow with the file."""

import math
from array import array
from bisect import bisect_left
from threading import Lock

from skyrl_inspect.dashboard.json_lines import Cache, parse, read_lines
from skyrl_inspect.dashboard.runs_folder import RunsFolder, join
from skyrl_train.types import JsonObject

MAX_RUNS = 24
"""Runs whose curves are kept in memory; those of 2,000 steps of 200 metrics take 6 MB."""

TIME = "time"


class CurveFile:
    """Columns of one `metrics.jsonl`. Of several lines of a step the last that has the metric counts."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._offset = 0
        self._inode = 0
        self._lock = Lock()

    def update(self, folder: RunsFolder, path: str) -> None:
        """Read what has been appended, or all of it if the file was replaced."""
        state = folder.state(path)
        with self._lock:
            if state is None or state.inode != self._inode or state.size < self._offset:
                self._columns, self._offset, self._inode = {}, 0, state.inode if state else 0
            if state is None or state.size == self._offset:
                return
            with folder.open(path) as file:
                for line in read_lines(file, self._offset):
                    self._offset = file.tell()
                    if (row := parse(line)) is not None:
                        self._add(row)

    def _add(self, row: JsonObject) -> None:
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or abs(step) >= 1 << 62:
            return
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, int | float)):
                if name not in self._columns:
                    self._columns[name] = array("q"), array("d")
                steps, values = self._columns[name]
                number = _to_float(value)
                if not steps or step > steps[-1]:
                    steps.append(step)
                    values.append(number)
                elif steps[index := bisect_left(steps, step)] == step:
                    values[index] = number
                else:
                    steps.insert(index, step)
                    values.insert(index, number)

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self._columns if name != TIME)

    def curve(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return steps and values of a metric, ready for JSON; both empty if the metric is missing."""
        steps, values = self._columns.get(name, (array("q"), array("d")))
        if name == TIME:  # Unix times have ten digits before the point
            return list(steps), [value if math.isfinite(value) else None for value in values]
        return list(steps), [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def _to_float(value: float | None) -> float:
    if value is None:
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


class Curves:
    """Curves of the runs of a folder."""

    def __init__(self, folder: RunsFolder):
        self._folder = folder
        self._files: Cache[CurveFile] = Cache(MAX_RUNS)

    def read_curves(self, run: str) -> CurveFile:
        """Return the curves of a run as they are now."""
        found = self._files.get(run, CurveFile)
        found.update(self._folder, join(run, "metrics.jsonl"))
        return found
