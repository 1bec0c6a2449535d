"""Time line of a run: the lanes of one step, and its last steps as a trace for Perfetto."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from threading import Lock

from skyrl_inspect.dashboard.json_lines import MAX_LINE, Cache, LineOffsets, parse
from skyrl_inspect.dashboard.runs_folder import RunsFolder, join
from skyrl_inspect.dashboard.swim_lanes import build_swim_lanes
from skyrl_train.types import JsonObject

STEPS_AROUND = 40
"""Steps after the shown one in whose records a group that it started may end."""

STEPS_OF_A_TRACE = 200
"""Steps that a trace holds, the last ones: Perfetto opens a few 100 MB."""

MAX_FILES = 24
_FIELDS = ("step", "began", "ended", "trained", "groups", "running", "waits", "phases")

Curve = tuple[Sequence[int], Sequence[float | None]]


class TimelineFile:
    """Records of one `rollouts/timeline.jsonl`: the step of each line, and the lines themselves when they are asked
    for."""

    def __init__(self) -> None:
        self._offsets = LineOffsets()
        self._inode = 0
        self.steps = array("q")
        """Steps that are whole, in the order of the file."""
        self._lines = array("q")  # of each step, its line
        self._num_parsed = 0
        self._lock = Lock()

    def update(self, folder: RunsFolder, path: str) -> None:
        """Read what has been appended, or all of it if the file was replaced."""
        state = folder.state(path)
        with self._lock:
            if state is None or state.inode != self._inode or state.size < self._offsets.end:
                self._offsets, self.steps, self._lines, self._num_parsed = LineOffsets(), array("q"), array("q"), 0
                self._inode = 0 if state is None else state.inode
            if state is None:
                return
            with folder.open(path) as file:
                self._offsets.update(file, state)
                for number in range(self._num_parsed, len(self._offsets)):
                    offset, size = self._offsets.span(number)
                    file.seek(offset)
                    row = parse(file.read(size)) if size <= MAX_LINE else None
                    if row is not None and is_complete(row):
                        self.steps.append(row["step"])
                        self._lines.append(number)
                self._num_parsed = len(self._offsets)

    def rows(self, folder: RunsFolder, path: str, start: int, end: int) -> list[JsonObject]:
        """Return the records from number `start` to `end` of `steps`."""
        found: list[JsonObject] = []
        with self._lock, folder.open(path) as file:
            for number in self._lines[max(0, start) : end]:
                offset, size = self._offsets.span(number)
                file.seek(offset)
                row = parse(file.read(size))
                if row is not None and is_complete(row):  # the file may have been replaced since
                    found.append(row)
        return found


class Timelines:
    """Time lines of the runs of a folder."""

    def __init__(self, folder: RunsFolder):
        self._folder = folder
        self._files: Cache[TimelineFile] = Cache(MAX_FILES)

    def lanes(self, run: str, step: int | None) -> JsonObject:
        """Return the lanes of a step, or of the last one, and the steps that have some."""
        path, file = self._of(run)
        steps = list(file.steps)
        if not steps:
            return {"steps": [], "lanes": None}
        index = steps.index(step) if step in steps else len(steps) - 1
        first = max(0, index - 1)
        rows = file.rows(self._folder, path, first, index + STEPS_AROUND)
        chosen = next((row for row in rows if row["step"] == steps[index]), None)
        if chosen is None:
            return {"steps": [], "lanes": None}
        # A synchronous step holds all that it starts.
        around = rows if chosen.get("unit", "group") == "group" else [chosen]
        return {"steps": steps, "lanes": asdict(build_swim_lanes(around, chosen)), "began": chosen["began"]}

    def read_last_records(self, run: str) -> list[JsonObject]:
        """Return the records of the last `STEPS_OF_A_TRACE` steps; none without a time line."""
        path, file = self._of(run)
        num = len(file.steps)
        return file.rows(self._folder, path, num - STEPS_OF_A_TRACE, num) if num else []

    def _of(self, run: str) -> tuple[str, TimelineFile]:
        path = join(run, "rollouts", "timeline.jsonl")
        file = self._files.get(run, TimelineFile)
        file.update(self._folder, path)
        return path, file


def is_complete(row: JsonObject) -> bool:
    """Return True for a record that has all its fields; `step` is a whole number."""
    return all(name in row for name in _FIELDS) and isinstance(row["step"], int)


def build_trace_events(records: Sequence[JsonObject], times: Curve, durations: Curve) -> list[JsonObject]:
    """Return the events of a trace: steps, the trainer's phases and waits, and a thread for each slot of generation.

    Args:
        records: of `rollouts/timeline.jsonl`; a run of an earlier release may have none, and its trace shows its steps
            alone.
        times: when each step was logged, Unix seconds.
        durations: seconds of each step.
    """
    seconds = {step: value for step, value in zip(*durations, strict=True) if value is not None}
    known = {row["step"] for row in records}
    steps = [
        (f"step {step}", end - seconds[step], end, {})
        for step, end in zip(*times, strict=True)
        if end is not None and step in seconds and (not known or step in known)
    ]
    trained = {ticket: row["step"] for row in records for ticket in row["trained"]}
    threads = {
        "steps": steps,
        "trainer": [(name, start, end, {"step": row["step"]}) for row in records for name, start, end in row["phases"]],
        "trainer waits": [(reason, start, end, {}) for row in records for start, end, reason in row["waits"]],
    }
    for row in records:
        for ticket, slot, start, end, version, outcome in row["groups"]:
            facts = {"weight version": version, "outcome": outcome, "trained in step": trained.get(ticket)}
            name = f"{row.get('unit', 'group')} {ticket}"
            threads.setdefault(f"slot {slot:03d}", []).append((name, start, end, facts))
    return list(_iter_events(threads))


def _iter_events(threads: dict[str, list[tuple[str, float, float, JsonObject]]]) -> Iterator[JsonObject]:
    begin = min((start for spans in threads.values() for _, start, _, _ in spans), default=0.0)
    for number, (name, spans) in enumerate(threads.items(), start=1):
        where = {"pid": 1, "tid": number}
        yield {"ph": "M", "name": "thread_name", "args": {"name": name}, **where}
        for text, start, end, facts in spans:
            micros = {"ts": round(1e6 * (start - begin)), "dur": round(1e6 * (end - start))}
            yield {"ph": "X", "name": text, "args": facts, **micros, **where}
