"""Swim lanes of asynchronous training: the slots and the trainer over the time of a step. Knows no HTML."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.types import JsonObject

MAX_STEPS = 24
"""Steps whose lanes the page has, spread over the run."""

MAX_SLOTS = 64
"""Lanes of a step: the slots with the lowest numbers."""

_PHASES = {
    "wait_for_generation_buffer": "waits for groups",
    "convert_to_training_input": "trains",
    "run_training": "trains",
    "update_ref_with_policy": "trains",
    "sync_weights": "syncs weights",
    "eval": "evaluates",
    "save_hf_model": "saves",
    "save_checkpoints": "saves",
}
"""Phases of the trainer that are no part of another, by what the page calls them."""


@dataclass
class Lanes:
    """Slots, phases and waits of a step. Times are seconds since its beginning, negative for what began before."""

    step: int
    seconds: float
    num_slots: int = 0
    """Slots in use, of which `groups` shows `MAX_SLOTS`."""
    groups: list[dict[str, object]] = field(default_factory=list)
    """ticket, slot, start, end (None: it went on), version, outcome, trained (the step that took it, or None)"""
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    waits: list[tuple[float, float, str]] = field(default_factory=list)


def swim_lanes(records: Iterable[JsonObject], spread: Any) -> list[Lanes]:
    """Return the lanes of some steps of a run.

    Args:
        records: of `RunFolder.read_timeline`, oldest first.
        spread: selects at most so many items at even distances (`spread(items, count)`).
    """
    rows = list(records)
    chosen = spread(rows, MAX_STEPS)
    trained = {ticket: row["step"] for row in rows for ticket in row["trained"]}
    begins = [row["began"] for row in chosen]
    found = [Lanes(row["step"], round(row["ended"] - row["began"], 4)) for row in chosen]
    for lanes, row in zip(found, chosen, strict=True):
        lanes.phases = [
            (_PHASES[name], *_since(row["began"], start, end)) for name, start, end in row["phases"] if name in _PHASES
        ]
        lanes.waits = [(*_since(row["began"], start, end), reason) for start, end, reason in row["waits"]]
    for ticket, slot, start, end, version, outcome in _groups(rows):
        # The steps begin one after the other: those that a group touches are neighbours in this list.
        last = len(begins) if end is None else bisect_right(begins, end)
        for index in range(max(0, bisect_right(begins, start) - 1), last):
            if start < chosen[index]["ended"] and (end is None or end > begins[index]):
                _add(found[index], begins[index], (ticket, slot, start, end, version, outcome), trained.get(ticket))
    return found


def _groups(rows: Sequence[JsonObject]) -> Iterable[Sequence[Any]]:
    """All groups: those that ended, and those that ran when the last record was written."""
    for row in rows:
        yield from row["groups"]
    for ticket, slot, start, version in rows[-1]["running"] if rows else []:
        yield ticket, slot, start, None, version, "running"


def _add(lanes: Lanes, began: float, group: Sequence[Any], trained: int | None) -> None:
    ticket, slot, start, end, version, outcome = group
    lanes.num_slots = max(lanes.num_slots, slot + 1)
    if slot < MAX_SLOTS:
        times = {"start": round(start - began, 4), "end": None if end is None else round(end - began, 4)}
        lanes.groups.append(
            {"ticket": ticket, "slot": slot, **times, "version": version, "outcome": outcome, "trained": trained}
        )


def _since(began: float, start: float, end: float) -> tuple[float, float]:
    return round(start - began, 4), round(end - began, 4)
