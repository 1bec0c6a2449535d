"""Diagnostics of a run for its page: those that the run recorded, or those that its last step shows."""

import dataclasses

from skyrl_inspect.dashboard.curves import CurveFile
from skyrl_inspect.dashboard.json_lines import parse
from skyrl_inspect.dashboard.runs_folder import RunsFolder, join
from skyrl_inspect.diagnostics.history import History
from skyrl_inspect.diagnostics.rules import find_diagnostics
from skyrl_train.types import JsonObject

NAME = "diagnostics.jsonl"
MAX_BYTES = 1 << 20
"""Bytes of the file that are read."""

_FIELDS = frozenset({"name", "onset", "step", "evidence", "advice", "settings", "page"})


def read_recorded(folder: RunsFolder, run: str) -> list[JsonObject]:
    """Return the diagnostics that a run recorded, oldest first."""
    path = join(run, NAME)
    if folder.state(path) is None:
        return []
    with folder.open(path) as file:
        rows = [parse(line) for line in file.read(MAX_BYTES).splitlines()]
    return [row for row in rows if row is not None and row.keys() >= _FIELDS]


def read_run_diagnostics(folder: RunsFolder, run: str, curves: CurveFile) -> list[JsonObject]:
    """Return the recorded diagnostics of a run, oldest first. Of a run without a record, what the rules find at its
    last step."""
    if folder.state(join(run, NAME)) is not None:
        return read_recorded(folder, run)
    history = History.from_curves((name, *curves.curve(name)) for name in curves.names)
    return [dataclasses.asdict(found) for found in find_diagnostics(history)]
