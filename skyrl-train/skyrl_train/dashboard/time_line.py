"""Time line of a run: the lanes of one step, and all of it as a trace for Perfetto."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from skyrl_train.report.swim_lanes import swim_lanes
from skyrl_train.types import JsonObject

STEPS_AROUND = 40
"""Steps after the shown one in whose records a group that it started may end."""

Curve = tuple[Sequence[int], Sequence[float | None]]


def lanes_of_step(records: Sequence[JsonObject], step: int | None) -> JsonObject:
    """Return the lanes of a step, or of the last one.

    Args:
        records: of `rollouts/timeline.jsonl`.
    """
    rows = [row for row in records if _is_whole(row)]
    steps = [row["step"] for row in rows]
    if not steps:
        return {"steps": [], "lanes": None}
    index = steps.index(step) if step in steps else len(steps) - 1
    window = rows[max(0, index - 1) : index + STEPS_AROUND]
    chosen = rows[index]
    [lanes] = swim_lanes(window, lambda _rows, _count: [chosen])
    return {"steps": steps, "lanes": asdict(lanes), "began": chosen["began"]}


def _is_whole(row: JsonObject) -> bool:
    return all(name in row for name in ("step", "began", "ended", "trained", "groups", "running", "waits", "phases"))


def trace_events(records: Sequence[JsonObject], times: Curve, durations: Curve) -> list[JsonObject]:
    """Return the events of a trace: steps, the trainer's phases and waits, and a thread for each slot of generation.

    Args:
        records: of `rollouts/timeline.jsonl`; a synchronous run has none, and its trace shows its steps alone.
        times: when each step was logged, Unix seconds.
        durations: seconds of each step.
    """
    seconds = {step: value for step, value in zip(*durations, strict=True) if value is not None}
    steps = [
        (f"step {step}", end - seconds[step], end, {})
        for step, end in zip(*times, strict=True)
        if end is not None and step in seconds
    ]
    rows = [row for row in records if _is_whole(row)]
    trained = {ticket: row["step"] for row in rows for ticket in row["trained"]}
    threads = {
        "steps": steps,
        "trainer": [(name, start, end, {"step": row["step"]}) for row in rows for name, start, end in row["phases"]],
        "trainer waits": [(reason, start, end, {}) for row in rows for start, end, reason in row["waits"]],
    }
    for row in rows:
        for ticket, slot, start, end, version, outcome in row["groups"]:
            facts = {"weight version": version, "outcome": outcome, "trained in step": trained.get(ticket)}
            threads.setdefault(f"slot {slot:03d}", []).append((f"group {ticket}", start, end, facts))
    return list(_events(threads))


def _events(threads: dict[str, list[tuple[str, float, float, JsonObject]]]) -> Iterator[JsonObject]:
    begin = min((start for spans in threads.values() for _, start, _, _ in spans), default=0.0)
    for number, (name, spans) in enumerate(threads.items(), start=1):
        where = {"pid": 1, "tid": number}
        yield {"ph": "M", "name": "thread_name", "args": {"name": name}, **where}
        for text, start, end, facts in spans:
            micros = {"ts": round(1e6 * (start - begin)), "dur": round(1e6 * (end - start))}
            yield {"ph": "X", "name": text, "args": facts, **micros, **where}
