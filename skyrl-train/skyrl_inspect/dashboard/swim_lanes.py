"""Swim lanes of a step: generation slots and phases of the processes over its time. Independent of HTML and files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.types import JsonObject

MAX_SLOTS = 64
"""Lanes of a step: the slots with the lowest numbers."""

_PHASES = {
    "wait_for_generation_buffer": "waits for groups",
    "generate": "generates",
    "convert_to_training_input": "trains",
    "run_training": "trains",
    "fwd_logprobs_values_reward": "trains",
    "compute_advantages_and_returns": "trains",
    "train_critic_and_policy": "trains",
    "update_ref_with_policy": "trains",
    "sync_weights": "syncs weights",
    "eval": "evaluates",
    "save_hf_model": "saves",
    "save_checkpoints": "saves",
    "load_checkpoints": "loads",
}
"""Phases of the trainer that are no part of another, by what the page calls them."""

_OF_WORKERS = {
    "fwd_logprobs_values_reward": ("models", "compute log-probs"),
    "policy_train": ("policy", "updates"),
    "critic_train": ("critic", "updates"),
}
"""Phases in which the workers of a model compute: lane and what they do."""


@dataclass
class Lanes:
    """Slots, phases and waits of a step. Times are seconds since its beginning, negative for what began before."""

    step: int
    seconds: float
    unit: str = "group"
    """Thing that has a slot: a group in asynchronous training, else a sample."""

    num_slots: int = 0
    """Slots in use, of which `groups` shows `MAX_SLOTS`."""
    groups: list[dict[str, object]] = field(default_factory=list)
    """ticket, slot, start, end (None: it went on), version, outcome, trained (the step that took it, or None)"""
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    """Of the trainer."""
    workers: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Lane, what its processes do, start, end."""
    waits: list[tuple[float, float, str]] = field(default_factory=list)


def build_swim_lanes(rows: Sequence[JsonObject], chosen: JsonObject) -> Lanes:
    """Return the lanes of a step.

    Args:
        rows: records of `RunFolder.read_timeline`, oldest first: the previous step, the step, and later ones in which
            its groups may end.
        chosen: the record of the step.
    """
    began, ended = chosen["began"], chosen["ended"]
    trained = {ticket: row["step"] for row in rows for ticket in row["trained"]}
    lanes = Lanes(chosen["step"], round(ended - began, 4), chosen.get("unit", "group"))
    for name, start, end in chosen["phases"]:
        if name in _PHASES:
            lanes.phases.append((_PHASES[name], *_to_relative(began, start, end)))
        if name in _OF_WORKERS:
            lanes.workers.append((*_OF_WORKERS[name], *_to_relative(began, start, end)))
    lanes.waits = [(*_to_relative(began, start, end), reason) for start, end, reason in chosen["waits"]]
    for ticket, slot, start, end, version, outcome in _list_groups(rows):
        if start < ended and (end is None or end > began):
            lanes.num_slots = max(lanes.num_slots, slot + 1)
            if slot < MAX_SLOTS:
                times = {"start": round(start - began, 4), "end": None if end is None else round(end - began, 4)}
                own = {"version": version, "outcome": outcome, "trained": trained.get(ticket)}
                lanes.groups.append({"ticket": ticket, "slot": slot, **times, **own})
    return lanes


def _list_groups(rows: Sequence[JsonObject]) -> Iterable[Sequence[Any]]:
    """All groups: those that ended, and those that ran when the last record was written."""
    for row in rows:
        yield from row["groups"]
    for ticket, slot, start, version in rows[-1]["running"] if rows else []:
        yield ticket, slot, start, None, version, "running"


def _to_relative(began: float, start: float, end: float) -> tuple[float, float]:
    return round(start - began, 4), round(end - began, 4)
