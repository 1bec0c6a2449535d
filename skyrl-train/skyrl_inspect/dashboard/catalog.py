"""List of the runs below a folder: state, progress, reward and settings of each, from files alone.

A run is a folder with `config.yaml`, `metrics.jsonl` or `trajectories`. Its name here is its path below the folder.
"""

import contextlib
import math
import re
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Literal, cast

import yaml

from skyrl_gym.waits import HEADER_BYTES, has_ended, read_facts
from skyrl_inspect.dashboard import agent_files, run_diagnostics
from skyrl_inspect.dashboard.json_lines import Cache, parse, read_lines, sample_rows
from skyrl_inspect.dashboard.runs_folder import FileState, FolderEntry, NotBelowError, RunsFolder, join
from skyrl_inspect.defaults import Defaults
from skyrl_train.types import JsonObject
from skyrl_train.utils.explanations import TRAINER
from skyrl_train.utils.run_folder import TRAJECTORIES_NAME

MAX_DEPTH = 5
MAX_FOLDERS = 20_000
"""Folders that a search for runs looks into."""

SEARCH_SECONDS = 3.0
"""Time between two searches for runs: open pages ask each second."""

SPARKLINE_POINTS = 60
LOG_TAIL = 256 << 10
"""Bytes of the end of a log that tell how a run fares."""

MAX_CHANGES = 40
"""Changed settings that a row of the list names."""

MAX_CONFIG = 4 << 20
MAX_STARTS = 4 << 20
SILENT_AFTER = 120.0
"""Seconds without a change after which a run counts as silent, or five of its steps if that is longer."""

State = Literal["running", "finished", "failed", "stopped", "silent"]

_NO_RUNS_IN = frozenset(
    {"trajectories", "rollouts", "logs", "ckpts", "exports", "trackers", "waits", "explanations", "blobs", "snapshots"}
)
_CURVES_OF_THE_LIST = ("reward/avg_raw_reward", "eval/all/avg_score", "loss", "train/loss", "eval/loss")
"""The first of these that a run has is drawn in the list."""

_RECORD = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING|ERROR|CRITICAL) +(.*)$")
_STEP = re.compile(r"step (\d+)(?:/(\d+))?\b")
_PLANNED = re.compile(r"^the run: (\d+) training steps", re.MULTILINE)
_STOPPED = ("stop requested", "told to stop")  # the latter in logs of earlier releases
_FINISHED = "this run is finished"


def find_runs(folder: RunsFolder) -> list[str]:
    """Return the names of all runs, in order. `.` is the folder itself."""
    found: list[str] = []
    pending = [(".", 0)]
    for _ in range(MAX_FOLDERS):
        if not pending:
            break
        path, depth = pending.pop()
        entries = folder.entries(path)
        if is_run(entries):
            found.append(path)
            if path != ".":  # a run holds no runs
                continue
        if depth < MAX_DEPTH:
            names = [e.name for e in entries if e.is_folder and e.name not in _NO_RUNS_IN and e.name[0] != "."]
            pending += [(join(path, name), depth + 1) for name in names]
    return sorted(found)


def is_run(entries: list[FolderEntry]) -> bool:
    """Return whether a folder with these entries is one of a run."""
    kinds = {entry.name: entry.is_folder for entry in entries}
    files = ("config.yaml", "metrics.jsonl", agent_files.NAME)
    return any(kinds.get(name) is False for name in files) or bool(kinds.get("trajectories"))


class Catalog:
    """Rows of the list of runs. A row is recomputed when a file that it depends on has changed."""

    def __init__(self, folder: RunsFolder, defaults: Defaults):
        self._folder = folder
        self.defaults = defaults
        self._facts: Cache[JsonObject] = Cache(4096)
        self._settings: Cache[Settings] = Cache(512)
        self._runs: tuple[float, list[str]] = (-math.inf, [])

    def list_rows(self) -> list[JsonObject]:
        """Return a row for each run, the one that changed last first."""
        rows = [self.get_row(run) for run in self.list_runs()]
        return sorted(rows, key=lambda row: -(cast(float, row["updated"]) or 0.0))

    def list_runs(self) -> list[str]:
        """Return the names of all runs, as of at most `SEARCH_SECONDS` ago."""
        if time.monotonic() - self._runs[0] > SEARCH_SECONDS:
            self._runs = time.monotonic(), find_runs(self._folder)
        return self._runs[1]

    def get_row(self, run: str) -> JsonObject:
        """Return name, state, progress, curve and changed settings of a run.

        Raises:
            NotBelowError: the run does not exist.
        """
        if not is_run(self._folder.entries(run)):
            raise NotBelowError(f"{run} is not a run folder")
        states = self.get_file_states(run)
        facts = self._facts.get((run, *states.values()), lambda: self._read(run, states))
        state, since = run_state(facts, time.time())
        if state == "running" and self._is_killed(run):
            state = "silent"
        changes = self.get_changed_settings(run)
        changed = {key: value for key, value, _ in changes[:MAX_CHANGES]}
        defaults = {key: default for key, _, default in changes[:MAX_CHANGES]}
        return {
            "run": run,
            **facts,
            "state": state,
            "since": since,
            "num_changed": len(changes),
            "changed": changed,
            "defaults": defaults,
        }

    def get_changed_settings(self, run: str) -> list[tuple[str, object, object]]:
        """Return the settings of a run that differ from their defaults: name, value, default (None for one without).

        Empty while the defaults are not known, and for runs of other settings (of supervised training).
        """
        defaults, values = self.defaults.values, self.get_settings(run).values
        # Some settings are mappings, in which a file has further names.
        defaults = defaults and dict(iter_flattened(defaults))
        if defaults is None or not any(key.startswith("trainer.algorithm.") for key in values):
            return []
        return [
            (key, value, defaults.get(key))
            for key, value in sorted(values.items())
            if key not in defaults or defaults[key] != value
        ]

    def get_settings(self, run: str) -> "Settings":
        """Return the settings of a run; empty if it has recorded none."""
        path = join(run, "config.yaml")
        state = self._folder.state(path)
        return self._settings.get((run, state), lambda: Settings(self._read_text(path) if state else ""))

    def get_file_states(self, run: str) -> dict[str, FileState | None]:
        """Return the states of the files that show whether a run is running."""
        paths = ("config.yaml", "metrics.jsonl", "logs/trainer.log", "rollouts/timeline.jsonl", agent_files.NAME)
        paths += (run_diagnostics.NAME,)
        return {path: self._folder.state(join(run, path)) for path in paths}

    def _is_killed(self, run: str) -> bool:
        """Return True if the record of the run's driver, which is deleted at its end, belongs to a process that has
        exited.
        """
        waits = join(run, "waits")
        with contextlib.suppress(NotBelowError, OSError, ValueError):
            for entry in self._folder.entries(waits):
                if entry.name.startswith(f"{TRAINER}-") and entry.name.endswith(".waits"):
                    with self._folder.open(join(waits, entry.name)) as file:
                        return has_ended(read_facts(file.read(HEADER_BYTES)))
        return False

    def _read_text(self, path: str) -> str:
        with self._folder.open(path) as file:
            return file.read(MAX_CONFIG).decode("utf-8", "replace")

    def _read(self, run: str, states: Mapping[str, FileState | None]) -> JsonObject:
        settings = self.get_settings(run)
        rows = self._sample_metrics(run, states["metrics.jsonl"])
        log = self._log_tail(run, states["logs/trainer.log"])
        steps = [row["step"] for row in rows if isinstance(row.get("step"), int)]
        times = [row["time"] for row in rows if isinstance(row.get("time"), int | float)]
        durations = [row["timing/step"] for row in rows if isinstance(row.get("timing/step"), int | float)]
        metric = next((name for name in _CURVES_OF_THE_LIST if any(name in row for row in rows)), None)
        points = [(row["step"], row[metric]) for row in rows if metric and isinstance(row.get(metric), int | float)]
        return {
            "name": str(settings.values.get("trainer.run_name") or (run if run != "." else self._folder.path.name)),
            "model": settings.values.get("trainer.policy.model.path"),
            "environment": settings.values.get("environment.env_class"),
            "seed": settings.values.get("trainer.seed"),
            "step": max(steps, default=log["step"]),
            "total": log["total"],
            "started": times[0] - (rows[0].get("timing/step") or 0.0) if times else None,
            "updated": max((state.modified for state in states.values() if state), default=0.0),
            "step_seconds": statistics.median(durations) if durations else None,
            "is_agent_file": states["config.yaml"] is None and states[agent_files.NAME] is not None,
            "outcome": log["outcome"],
            "message": log["message"],
            "diagnostics": list(dict.fromkeys(row["name"] for row in run_diagnostics.read_recorded(self._folder, run))),
            "metric": metric,
            "curve": [[step for step, _ in points], [float(f"{value:.5g}") for _, value in points]],
        }

    def _sample_metrics(self, run: str, state: FileState | None) -> list[JsonObject]:
        if state is None:
            return []
        with self._folder.open(join(run, "metrics.jsonl")) as file:
            return list(sample_rows(file, state.size, SPARKLINE_POINTS))

    def _log_tail(self, run: str, state: FileState | None) -> JsonObject:
        if state is None:
            return log_facts("")
        with self._folder.open(join(run, "logs/trainer.log")) as file:
            head = file.read(LOG_TAIL).decode("utf-8", "replace") if state.size > LOG_TAIL else ""
            file.seek(max(0, state.size - LOG_TAIL))
            found = log_facts(file.read(LOG_TAIL).decode("utf-8", "replace"))
        if found["total"] is None and (planned := _PLANNED.findall(head)):
            found["total"] = int(planned[-1])
        return found


def log_facts(text: str) -> JsonObject:
    """Parse the end of a trainer's log: step and total of the last progress line, outcome (`finished`, `failed`,
    `stopped`, None while running) and its message.
    """
    step = total = outcome = message = None
    if planned := _PLANNED.findall(text):
        total = int(planned[-1])
    for level, said in iter_records(text):
        if progress := _STEP.match(said):
            step, total, outcome, message = int(progress[1]), int(progress[2] or 0) or total, None, None
        elif level in ("ERROR", "CRITICAL"):
            outcome, message = "failed", said
        elif said.startswith(_STOPPED):
            outcome, message = "stopped", said
        elif said.startswith(_FINISHED):
            outcome, message = "finished", None
        elif said == "step plan":  # another start
            outcome, message = None, None
    return {"step": step, "total": total, "outcome": outcome, "message": message}


def iter_records(text: str) -> Iterator[tuple[str, str]]:
    """Yield level and text of the records of a log, without the lines that continue them."""
    for line in text.split("\n"):
        if found := _RECORD.match(line):
            yield found[1], found[2][:2000]


def run_state(facts: Mapping[str, object], now: float) -> tuple[State, float]:
    """Return the state of a run and since when it has it (Unix seconds).

    A run that was killed wrote nothing of it: it is silent, since its last change.
    """
    updated = cast(float, facts["updated"])
    step, total = cast(int | None, facts["step"]), cast(int | None, facts["total"])
    if facts["outcome"] in ("failed", "stopped", "finished"):
        return cast(State, facts["outcome"]), updated
    if step is not None and total and step >= total:
        return "finished", updated
    if facts["is_agent_file"]:  # it does not tell how many trajectories there will be
        return ("running" if now - updated < SILENT_AFTER else "finished"), updated
    patience = max(SILENT_AFTER, 5 * cast(float, facts["step_seconds"] or 0.0))
    return ("running" if now - updated < patience else "silent"), updated


class Settings:
    """Resolved settings of a run.

    Args:
        text: of `config.yaml`.
    """

    def __init__(self, text: str):
        self.text = text
        try:
            # The C parser of YAML is ten times faster, and not everywhere.
            tree = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (yaml.YAMLError, ValueError, RecursionError):
            tree = None
        self.values: dict[str, object] = dict(iter_flattened(tree))


def _to_plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def iter_flattened(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values below nested mappings by their full names."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from iter_flattened(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, _to_plain(tree)


def find_command(folder: RunsFolder, run: str) -> str | None:
    """Return the command of a run's last start, which resumes it; None if the run recorded none."""
    path = join(run, "starts.jsonl")
    if folder.state(path) is None:
        return None
    with folder.open(path) as file:
        starts = [parse(line) for line in file.read(MAX_STARTS).splitlines()]
    last = next((start for start in reversed(starts) if start is not None), {})
    command, where = last.get("command"), last.get("folder")
    return f"cd {shlex.quote(where)} && {command}" if isinstance(command, str) and isinstance(where, str) else None


def find_in_log(folder: RunsFolder, path: str, query: str, max_hits: int = 200) -> list[tuple[int, str]]:
    """Return offset and text of the last lines that contain a text, whatever its case."""
    wanted = query.casefold()
    hits: list[tuple[int, str]] = []
    with folder.open(path) as file:
        offset = 0
        for line in read_lines(file):
            text = line.decode("utf-8", "replace")
            if wanted in text.casefold():
                hits.append((offset, text[:1000].rstrip("\n")))
                del hits[:-max_hits]
            offset = file.tell()
    return hits


def list_trajectory_steps(folder: RunsFolder, run: str) -> dict[str, list[int]]:
    """Return the steps with stored trajectories, by phase, in order."""
    found: dict[str, list[int]] = {"train": [], "eval": []}
    if folder.state(join(run, agent_files.NAME)) is not None:
        found[agent_files.PHASE].append(agent_files.STEP)
    for entry in folder.entries(join(run, "trajectories")):
        if not entry.is_folder and (name := TRAJECTORIES_NAME.fullmatch(entry.name)):
            found[name[1]].append(int(name[2]))
    return {phase: sorted(set(steps)) for phase, steps in found.items()}
