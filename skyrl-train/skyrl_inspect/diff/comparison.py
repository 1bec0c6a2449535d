"""Comparison of two runs as one object, which text, page and JSON show. Independent of the output format."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyrl_inspect.diff.causes import Cause, ChangedItem, Evidence, rank_causes
from skyrl_inspect.diff.effects import has_no_effect
from skyrl_inspect.diff.parting import Difference, StepPart, find_divergence, list_compared_steps
from skyrl_inspect.diff.recorded_run import RecordedRun, Start
from skyrl_train.provenance import DataDigest
from skyrl_train.types import JsonObject

_SCHEDULER = "trainer.policy.optimizer_config.scheduler"
_ENGINE_GAP = "policy/rollout_train_logprobs_abs_diff_max"


@dataclass(frozen=True)
class RunComparison:
    """Result of comparing the runs A and B.

    Args:
        names: their folders.
        last_steps: the last step of each; 0: none.
        changes: settings, data and versions that differ before the first difference, or anywhere if the runs are equal.
        parting: the first difference of each stage in the step where the runs diverge; empty if they are equal.
        equal_up_to: the last step whose records are equal; None: not even those before step 1.
        causes: of the first difference, most likely first.
        unrecorded: what could not be compared, one sentence each.
        num_compared: number of steps with records of both.
    """

    names: tuple[str, str]
    last_steps: tuple[int, int]
    changes: Sequence[ChangedItem]
    parting: Sequence[Difference]
    equal_up_to: int | None
    causes: Sequence[Cause]
    unrecorded: Sequence[str]
    num_compared: int

    @property
    def are_equal(self) -> bool:
        """True if every number that both record is the same."""
        return not self.parting and self.num_compared > 0

    @property
    def verdict(self) -> str:
        """Sentence about the equal part and the first difference."""
        if not self.num_compared:
            without = [
                f"{letter} has no step yet" for letter, last in zip("AB", self.last_steps, strict=True) if not last
            ]
            return f"{' and '.join(without) or 'no step is recorded by both'}: only settings and versions are compared"
        if not self.parting:
            last = self.equal_up_to or 0
            shorter = min(self.last_steps) != max(self.last_steps)
            end = f", the last step of both (A has {self.last_steps[0]}, B {self.last_steps[1]})" if shorter else ""
            return f"bit-equal up to step {last}{end}"
        equal = f"equal up to step {self.equal_up_to}" if self.equal_up_to else "no step is equal"
        cause = self.causes[0]
        words = f"; likely cause: {cause.text}" if cause.likelihood == "likely" else ""
        return f"{equal}; first difference: {self.parting[0]}{words}"

    def to_json(self) -> JsonObject:
        """Return it as JSON values."""
        return {
            "a": {"folder": self.names[0], "last_step": self.last_steps[0]},
            "b": {"folder": self.names[1], "last_step": self.last_steps[1]},
            "verdict": self.verdict,
            "equal": self.are_equal,
            "equal_up_to": self.equal_up_to,
            "steps_compared": self.num_compared,
            "causes": [vars(cause) | {"likelihood": cause.likelihood} for cause in self.causes],
            "differences": [
                vars(each) | {"stage": each.stage.name.lower(), "gap": each.gap, "text": str(each)}
                for each in self.parting
            ],
            "changes": [vars(change) | {"matters": is_relevant(change)} for change in self.changes],
            "unrecorded": list(self.unrecorded),
        }


def is_relevant(change: ChangedItem) -> bool:
    """Return False for names, places and the like, which change no number."""
    return change.group != "setting" or not has_no_effect(change.name)


def compare_runs(a: str | Path, b: str | Path) -> RunComparison:
    """Compare two runs from their folders alone; they may be running, finished, crashed or copied.

    Raises:
        DataError: a folder is not a run's, or a file in it is broken; names it and the fix.
    """
    runs = RecordedRun(a), RecordedRun(b)
    steps = list_compared_steps(*runs)
    parting = find_divergence(*runs, steps)
    before = [step for step in steps if not parting or step < parting[0].step]
    changes = list(_find_changes(*runs))
    causes: list[Cause] = []
    if parting:
        causes = rank_causes(parting[0], changes, _collect_evidence(*runs, parting[0]))
    return RunComparison(
        names=(str(runs[0].folder.path), str(runs[1].folder.path)),
        last_steps=(runs[0].last_step, runs[1].last_step),
        changes=changes,
        parting=parting,
        equal_up_to=before[-1] if before else None,
        causes=causes,
        unrecorded=list(_list_unrecorded(*runs, steps)),
        num_compared=len([step for step in steps if step > 0]),
    )


# ---- what differs


def _find_changes(a: RecordedRun, b: RecordedRun) -> Iterator[ChangedItem]:
    """Yield everything that is not the same, with the first step of the first start for which it is not."""
    found: dict[tuple[str, str], ChangedItem] = {}
    for step in sorted({start.first_step for run in (a, b) for start in run.starts} | {1}):
        now = {
            (change.group, change.name): change
            for change in _find_changes_between(a.start_of(step), b.start_of(step), step)
        }
        for key, change in found.items():
            if key not in now and change.until is None:
                found[key] = replace(change, until=step - 1)
        for key, change in now.items():
            earlier = found.get(key)
            if earlier is None or earlier.until is not None or (earlier.a, earlier.b) != (change.a, change.b):
                found[key] = change
    yield from found.values()
    text_a, text_b = a.data_text, b.data_text
    both_tell = text_a is not None and text_b is not None
    if both_tell and text_a != text_b and not (a.has_starts and b.has_starts):
        yield ChangedItem("data", "training data", text_a, text_b)


def _find_changes_between(a: Start, b: Start, step: int) -> Iterator[ChangedItem]:
    """Yield what differs between two starts. What one of them does not record is not compared."""
    if a.settings and b.settings:
        names = [*a.settings, *(name for name in b.settings if name not in a.settings)]
        for name in names:
            if a.settings.get(name) != b.settings.get(name):
                yield ChangedItem("setting", name, a.settings.get(name), b.settings.get(name), step)
    for group, key in (("library", "libraries"), ("machine", "machine"), ("code", "code")):
        yield from _find_changed_entries(group, a.record.get(key), b.record.get(key), step)
    if a.data is not None and b.data is not None and a.data.in_order != b.data.in_order:
        yield ChangedItem("data", "training data", str(a.data), f"{b.data}; {_describe_data(a.data, b.data)}", step)
    one, other = a.record.get("tokenizer"), b.record.get("tokenizer")
    if one and other and one != other:
        parts = [name for name in ("tokens", "digest", "chat_template") if one.get(name) != other.get(name)]
        values = [", ".join(f"{name} {each.get(name)}" for name in parts) for each in (one, other)]
        yield ChangedItem("tokenizer", "tokenizer", values[0], values[1], step)
    yield from _find_changed_environments(a.record.get("environments"), b.record.get("environments"), step)


def _find_changed_entries(
    group: str, a: Mapping[str, str] | None, b: Mapping[str, str] | None, step: int
) -> Iterator[ChangedItem]:
    if a and b:
        for name in sorted(a.keys() | b.keys()):
            if a.get(name) != b.get(name):
                title = {"code": f"code of {name}"}.get(group, name)
                yield ChangedItem(group, title, a.get(name), b.get(name), step)


def _find_changed_environments(a: JsonObject | None, b: JsonObject | None, step: int) -> Iterator[ChangedItem]:
    """Yield environments of one id whose code differs. (Other ids are settings, or columns of the data.)"""
    if a and b:
        for name in sorted(a.keys() & b.keys()):
            if a[name] != b[name]:
                texts = [" ".join(str(value) for value in each[name].values()) for each in (a, b)]
                yield ChangedItem("environment", f"environment {name}", texts[0], texts[1], step)


def _describe_data(a: DataDigest, b: DataDigest) -> str:
    """Describe where two datasets differ."""
    if a.content == b.content:
        return "the same rows in a different order"
    if a.num_rows != b.num_rows:
        return f"{abs(a.num_rows - b.num_rows)} rows {'more' if b.num_rows > a.num_rows else 'fewer'}"
    places = find_differing_rows(a, b)
    if not places:
        return "rows differ"
    first = places[0]
    rows = f"row {first.start}" if len(first) == 1 else f"rows {first.start} to {first.stop - 1}"
    return f"first in {rows}, {len(places)} of {len(a.chunks)} {'rows' if a.chunk_rows == 1 else 'parts'} differ"


def find_differing_rows(a: DataDigest, b: DataDigest) -> list[range]:
    """Return the rows in which datasets of equal size differ, by parts with separate hashes."""
    size = a.chunk_rows
    pairs = enumerate(zip(a.chunks, b.chunks, strict=False))
    return [range(i * size, min(a.num_rows, (i + 1) * size)) for i, (one, other) in pairs if one != other]


# ---- evidence for causes


def _collect_evidence(a: RecordedRun, b: RecordedRun, difference: Difference) -> Evidence:
    starts = a.start_of(difference.step), b.start_of(difference.step)
    data_a, data_b = (start.data for start in starts)
    row_differs, same_rows = None, False
    if data_a is not None and data_b is not None and data_a.in_order != data_b.in_order:
        same_rows = data_a.content == data_b.content
        number = (difference.uid or "").partition("#")[0]  # a prompt that occurs twice in a step has a suffix
        if number.isdigit() and data_a.num_rows == data_b.num_rows:
            row_differs = any(int(number) in rows for rows in find_differing_rows(data_a, data_b))
    before = [run.hashes.get(max(0, difference.step - 1)) for run in (a, b)]
    weights = [each.weights if each else {} for each in before]
    gaps = [run.metrics.get(difference.step, {}).get(_ENGINE_GAP) for run in (a, b)]
    known_gaps = [float(gap) for gap in gaps if isinstance(gap, int | float)]
    asynchronous = all(
        start.settings.get("trainer.fully_async.enabled") and start.settings.get("trainer.fully_async.order") != "exact"
        for start in starts
    )
    keys = {"data": "data", "tokenizer": "tokenizer", "environment": "environments"}
    return Evidence(
        weights_before=weights[0] == weights[1] if all(weights) else None,
        data_row_differs=row_differs,
        same_rows=same_rows,
        engine_gaps=(known_gaps[0], known_gaps[1]) if len(known_gaps) == 2 else None,
        asynchronous=asynchronous,
        constant_rate=all(str(start.settings.get(_SCHEDULER)).startswith("constant") for start in starts),
        unrecorded=frozenset(
            group for group, key in keys.items() if not all(start.record.get(key) for start in starts)
        ),
    )


def _list_unrecorded(a: RecordedRun, b: RecordedRun, steps: Sequence[int]) -> Iterator[str]:
    """Yield what could not be compared, with the setting that records it."""
    for letter, run in zip("AB", (a, b), strict=True):
        if not run.starts[0].settings:
            yield f"{letter} has no config.yaml: settings are not compared"
        if not run.has_starts:
            yield (
                f"{letter} has no starts.jsonl (written by an earlier release): versions, machine, tokenizer and "
                "environments are not compared"
            )
        if run.num_unplaced_configs:
            yield (
                f"{letter} was started earlier with other settings (config_1.yaml …) and does not record for which "
                "steps: the newest are compared"
            )
        if run.last_step and not any(phase == "train" for _, phase in run.trajectory_paths):
            yield f"{letter} has no trajectories (trainer.dump_trajectories=true writes them): samples are not compared"
        if run.last_step and not any(each.weights for each in run.hashes.values()):
            yield (
                f"{letter} has no fingerprints of weights (trainer.dump_trajectories=true and "
                "generator.weight_sync_verification=sampled or full write them): weights are not compared"
            )
    if steps and steps != list(range(steps[0], steps[-1] + 1)):
        yield "some steps in between are recorded by only one run: a divergence there is shown at the next common step"


def get_stage_name(stage: StepPart) -> str:
    """Return the name of a stage for people."""
    return {
        StepPart.START: "initial weights",
        StepPart.PROMPTS: "prompts",
        StepPart.GENERATION: "generation",
        StepPart.ENVIRONMENT: "environment",
        StepPart.SCORES: "trainer's log-probs and values",
        StepPart.ADVANTAGES: "advantages",
        StepPart.UPDATE: "update",
        StepPart.WEIGHTS: "weights after the update",
        StepPart.EVALUATION: "evaluation",
    }[stage]


def to_json_text(comparison: RunComparison) -> str:
    """Return the comparison as indented JSON."""
    return json.dumps(comparison.to_json(), indent=1, default=str)
