"""The first difference of two runs: step, sample, token and tensor. Knows the order of a step, no causes.

weights of the engines -> prompts -> tokens and their log-probs -> environment -> scores -> advantages -> update
"""

import filecmp
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from typing import Any

from skyrl_inspect.diff.recorded_run import RecordedRun, StepHashes
from skyrl_train.run_record import COMPUTED
from skyrl_train.types import JsonObject
from skyrl_train.utils.run_folder import Phase


class StepPart(IntEnum):
    """Part of a step, in the order of computation."""

    START = 0
    """Weights before the first step."""
    PROMPTS = 1
    GENERATION = 2
    ENVIRONMENT = 3
    """Observations, rewards, ends of trajectories."""
    SCORES = 4
    """Log-probs and values that the trainer computes before it updates."""
    ADVANTAGES = 5
    UPDATE = 6
    WEIGHTS = 7
    """Weights after the update."""
    EVALUATION = 8


@dataclass(frozen=True)
class Difference:
    """Difference between numbers of two runs.

    Args:
        step: 0 is before training.
        quantity: name of the differing number, such as `rollout log-prob` or `policy/policy_lr`.
        a, b: the values; None: that run has none.
        sample: position of the sample in the step, and its identity.
        token: place in the prompt or the response.
        kind: kind of difference that a cause must explain, if the stage alone is ambiguous (`causes`).
        note: how many others differ.
    """

    step: int
    stage: StepPart
    quantity: str
    a: Any = None
    b: Any = None
    sample: int | None = None
    uid: str | None = None
    token: int | None = None
    kind: str = ""
    note: str = ""

    @property
    def gap(self) -> float | None:
        """Absolute difference of two numbers; None for others."""
        if isinstance(self.a, bool) or isinstance(self.b, bool):
            return None
        if isinstance(self.a, int | float) and isinstance(self.b, int | float) and not self.kind.endswith("id"):
            return abs(self.a - self.b)
        return None

    @property
    def relative_gap(self) -> float | None:
        """Difference over the larger of two numbers; None for others."""
        return None if self.gap is None else self.gap / max(abs(self.a), abs(self.b), 1e-30)

    def __str__(self) -> str:
        of_token = "" if self.token is None else f" of token {self.token}"
        uid = "" if self.uid is None else f" (prompt {self.uid})"
        of_sample = "" if self.sample is None else f" of sample {self.sample}{uid}"
        where = "before step 1" if self.step == 0 else f"of step {self.step}"
        values = ""
        if self.gap is not None:
            values = f": {_to_number(self.a)} against {_to_number(self.b)}, a difference of {self.gap:.2g}"
        elif self.a is not None or self.b is not None:
            values = f": {_get_value(self.a)} against {_get_value(self.b)}"
        note = f" ({self.note})" if self.note else ""
        return f"{self.quantity}{of_token}{of_sample} {where}{values}{note}"


def _to_number(value: float) -> str:
    return f"{value:.9g}"


def _get_value(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def find_step_differences(a: RecordedRun, b: RecordedRun, step: int) -> list[Difference]:
    """Return the first difference of each stage of a step, in the order of computation."""
    found = [] if step == 0 else list(_compare_trajectories(a, b, step, "train"))
    hashes = a.hashes.get(step, StepHashes()), b.hashes.get(step, StepHashes())
    found += _compare_batches(step, *hashes, a, b)
    found += _compare_metrics(step, a.metrics.get(step, {}), b.metrics.get(step, {}))
    found += _compare_weights(step, *hashes)
    found += [_to_evaluation(difference) for difference in _compare_trajectories(a, b, step, "eval")]
    first: dict[StepPart, Difference] = {}
    for difference in sorted(found, key=lambda difference: difference.stage):  # stable: the order within a stage stays
        first.setdefault(difference.stage, difference)
    return list(first.values())


# ---- trajectories


def _compare_trajectories(a: RecordedRun, b: RecordedRun, step: int, phase: Phase) -> Iterator[Difference]:
    """Yield the first difference of each stage among the samples of a step."""
    of_a, of_b = a.trajectory_paths.get((step, phase)), b.trajectory_paths.get((step, phase))
    if of_a is None or of_b is None or filecmp.cmp(of_a, of_b, shallow=False):
        return
    first: dict[StepPart, Difference] = {}
    pairs = zip_longest(a.read_trajectories(step, phase), b.read_trajectories(step, phase))
    for index, (row_a, row_b) in enumerate(pairs):
        if row_a is None or row_b is None:
            alone, other = ("B", "A") if row_a is None else ("A", "B")
            row = row_a or row_b
            assert row is not None
            note = f"{alone} has more samples than {other} in this step"
            difference = Difference(
                step, StepPart.PROMPTS, "number of samples", sample=index, uid=row.get("uid"), kind="number", note=note
            )
            first.setdefault(StepPart.PROMPTS, difference)
            break
        if _make_key(row_a) != _make_key(row_b):
            names = (_make_name(row_a), _make_name(row_b))
            difference = Difference(
                step, StepPart.PROMPTS, "prompt", *names, sample=index, kind="order", note="a different prompt"
            )
            first.setdefault(StepPart.PROMPTS, difference)
            break  # the samples behind this one are not those of the same prompts
        difference = compare_rows(step, index, row_a, row_b)
        if difference is not None:
            first.setdefault(difference.stage, difference)
    yield from first.values()


def _make_key(row: JsonObject) -> tuple[object, ...]:
    return row.get("uid"), row.get("sample"), row.get("step")


def _make_name(row: JsonObject) -> str:
    return f"{row.get('uid')} (sample {row.get('sample')})"


def compare_rows(step: int, index: int, a: JsonObject, b: JsonObject) -> Difference | None:
    """Return the first difference of two rows of the same prompt and sample, None if they are equal. Columns that one
    of them lacks are not compared.
    """

    def at(
        stage: StepPart, quantity: str, one: Any, other: Any, token: int | None = None, kind: str = ""
    ) -> Difference:
        return Difference(step, stage, quantity, one, other, sample=index, uid=a.get("uid"), token=token, kind=kind)

    # The prompt of a later turn is what the environment has answered so far.
    prompts = StepPart.ENVIRONMENT if a.get("step") else StepPart.PROMPTS
    if texts := _get_differing(a, b, "prompt"):
        place = _find_first_difference(*texts)
        parts = [text[max(0, place - 20) : place + 30] for text in texts]
        return at(prompts, f"prompt from character {place} on", *parts, kind="prompt text")
    if ids := _get_differing(a, b, "prompt_ids"):
        place = _find_first_difference(*ids)
        return at(prompts, "id of prompt token", *_get_values_at(*ids, place), place, "prompt id")
    tokens_a, tokens_b = a.get("tokens") or {}, b.get("tokens") or {}
    if tokens_a != tokens_b:
        found = _compare_tokens(tokens_a, tokens_b)
        if found is not None:
            stage, quantity, one, other, place, kind = found
            return at(stage, quantity, one, other, place, kind)
    if texts := _get_differing(a, b, "response"):
        return at(StepPart.GENERATION, "text of the same response tokens", *texts, kind="text")
    for name in ("stop_reason", "failure", "reward"):
        if name in a and name in b and a[name] != b[name]:
            return at(StepPart.ENVIRONMENT, name.replace("_", " "), a[name], b[name])
    return None


_COLUMNS = (
    ("weight_versions", "weight version", StepPart.GENERATION),
    ("ids", "id", StepPart.GENERATION),
    ("log_probs", "rollout log-prob", StepPart.GENERATION),
    ("loss_mask", "loss mask", StepPart.ENVIRONMENT),
    ("rewards", "reward", StepPart.ENVIRONMENT),
)


def _compare_tokens(a: JsonObject, b: JsonObject) -> tuple[StepPart, str, Any, Any, int, str] | None:
    """Return stage, quantity, values, place and kind of the first token of two responses that differs."""
    places = {
        name: _find_first_difference(*values)
        for name, _, _ in _COLUMNS
        if (values := _get_differing(a, b, name)) is not None
    }
    if not places:
        return None
    place = min(places.values())
    name, quantity, stage = next(column for column in _COLUMNS if places.get(column[0]) == place)
    one, other = _get_values_at(a[name], b[name], place)
    if name == "ids" and not (_is_generated(a, place) or _is_generated(b, place)):
        return StepPart.ENVIRONMENT, "id of observation token", one, other, place, "observation id"
    kind = {"ids": "token id", "weight_versions": "version id", "log_probs": "log-prob"}.get(name, "")
    return stage, quantity, one, other, place, kind


def _is_generated(tokens: JsonObject, place: int) -> bool:
    """Return True if the model generated the token. (A failed trajectory has a loss mask of 0, but log-probs.)"""
    for name in ("loss_mask", "log_probs"):
        values = tokens.get(name) or []
        if place < len(values) and values[place]:
            return True
    return False


def _get_differing(a: JsonObject, b: JsonObject, name: str) -> tuple[Any, Any] | None:
    """Return what two rows have of a column if both have it and it differs."""
    one, other = a.get(name), b.get(name)
    return None if one is None or other is None or one == other else (one, other)


def _find_first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    different = (index for index, (one, other) in enumerate(zip(a, b, strict=False)) if one != other)
    return next(different, min(len(a), len(b)))


def _get_values_at(a: Sequence[Any], b: Sequence[Any], place: int) -> tuple[Any, Any]:
    return (a[place] if place < len(a) else None), (b[place] if place < len(b) else None)


# ---- hashes


_STAGE_OF_COLUMN = {
    "sequences": StepPart.PROMPTS,
    "advantages": StepPart.ADVANTAGES,
    "returns": StepPart.ADVANTAGES,
    "loss_weights": StepPart.ADVANTAGES,
}


_TOKEN_COLUMNS = {"action_log_probs": "trainer_log_probs", "advantages": "advantages"}
"""Columns of the batch whose tokens a run may have recorded, and their names there."""


def _compare_batches(
    step: int, a: StepHashes, b: StepHashes, run: RecordedRun, other_run: RecordedRun
) -> Iterator[Difference]:
    """Yield the first sample of each column of the batch whose numbers differ."""
    for name in ("sequences", *COMPUTED):
        of_a, of_b = a.batch.get(name), b.batch.get(name)
        if of_a is None or of_b is None or of_a == of_b:
            continue
        row = _find_first_difference(of_a, of_b)
        differing = sum(one != other for one, other in zip(of_a, of_b, strict=False))
        stage = _STAGE_OF_COLUMN.get(name, StepPart.SCORES)
        note = f"{differing} of {min(len(of_a), len(of_b))} samples differ in it"
        note += _find_first_token(
            [each.read_token_column(step, row, _TOKEN_COLUMNS.get(name, "")) for each in (run, other_run)]
        )
        means = [values[row] if row < len(values := each.means.get(name, [])) else None for each in (a, b)]
        values, title = (means, f"mean of {name}") if means[0] != means[1] else ([None, None], name)
        kind = "prompt text" if stage is StepPart.PROMPTS else "log-prob" if name.endswith("log_probs") else name
        uid = _get_row_uid(run, step, row)
        yield Difference(step, stage, title, *values, sample=row, uid=uid, kind=kind, note=note)


def _find_first_token(columns: Sequence[Sequence[float | None] | None]) -> str:
    """Describe the first token in which a recorded column of two runs differs; empty if none does."""
    one, other = columns
    if one is None or other is None or one == other:
        return ""
    place = _find_first_difference(one, other)
    values = _get_values_at(one, other, place)
    return "; first in token {}: {} against {}".format(place, *map(_get_value, values))


def _get_row_uid(run: RecordedRun, step: int, index: int) -> str | None:
    """Return the prompt of a row of the batch, if trajectories were written."""
    if (step, "train") not in run.trajectory_paths:
        return None
    rows = run.read_trajectories(step, "train")
    return next((row.get("uid") for number, row in enumerate(rows) if number == index), None)


def _compare_weights(step: int, a: StepHashes, b: StepHashes) -> Iterator[Difference]:
    """Yield the first tensor of the weights after a step that differs."""
    names = [name for name in a.weights if name in b.weights]
    differing = [name for name in names if a.weights[name] != b.weights[name]]
    alone = a.weights.keys() ^ b.weights.keys() if a.weights and b.weights else set()
    if not differing and not alone:
        return
    stage = StepPart.START if step == 0 else StepPart.WEIGHTS
    name = (differing or sorted(alone))[0]
    note = f"{len(differing)} of {len(names)} tensors differ" if differing else "one of the models has no such tensor"
    kind = "few weights" if differing and not alone and len(differing) <= max(1, len(names) // 20) else "weights"
    yield Difference(step, stage, f"weights {name}", kind=kind, note=note)


# ---- metrics


_IGNORED_METRICS = ("timing/", "engines/", "weight_sync/", "async/", "expected/", "trainer/", "memory/")
_IGNORED_PARTS = ("seconds", "memory", "per_second", "throughput")
_FIRST_METRICS = ("_lr", "/lr", "rollout_train", "policy_loss", "final_loss", "critic_loss", "train/loss")


def get_metric_stage(name: str) -> StepPart | None:
    """Return the stage of a metric; None for times, sizes of memory and states of queues, which are never the same."""
    if name in ("step", "time") or name.startswith(_IGNORED_METRICS) or any(part in name for part in _IGNORED_PARTS):
        return None
    stages = {
        "generate/": StepPart.GENERATION,
        "policy/rollout_train": StepPart.SCORES,
        "loss/": StepPart.ADVANTAGES,
        "policy/": StepPart.UPDATE,
        "critic/": StepPart.UPDATE,
        "train/": StepPart.UPDATE,
        "eval/": StepPart.EVALUATION,
    }
    return next((stage for prefix, stage in stages.items() if name.startswith(prefix)), StepPart.ENVIRONMENT)


def _compare_metrics(step: int, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the metrics of a step that both runs have and that differ: learning rates and losses first, since all
    others of an update follow from them."""

    def rank(name: str) -> int:
        return next((index for index, part in enumerate(_FIRST_METRICS) if part in name), len(_FIRST_METRICS))

    for name in sorted((name for name in a if name in b), key=rank):  # stable: otherwise as they were logged
        stage = get_metric_stage(name)
        if stage is not None and a[name] != b[name]:
            yield Difference(step, stage, name, a[name], b[name], kind="lr" if rank(name) < 2 else "")


def _to_evaluation(difference: Difference) -> Difference:
    values = {**vars(difference), "stage": StepPart.EVALUATION}
    return Difference(**{**values, "quantity": f"{difference.quantity} in the evaluation"})


def list_compared_steps(a: RecordedRun, b: RecordedRun) -> list[int]:
    """Return the steps that both runs have records of, in order."""
    return sorted(a.steps & b.steps)


def find_divergence(a: RecordedRun, b: RecordedRun, steps: Iterable[int]) -> list[Difference]:
    """Return the differences of the first step that has any, one per stage; empty if all steps are equal."""
    return next((found for step in steps if (found := find_step_differences(a, b, step))), [])
