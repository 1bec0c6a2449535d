"""Likely causes of the first difference of two runs, ranked by what each can explain. Independent of files.

A cause must be able to change the part of the step in which the runs part (`effects`): what takes effect later explains
nothing, what takes effect earlier would have shown there. The size of the gap and the kind of the difference (another
order of prompts, other ids of the same text, one tensor of many) decide between the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_inspect.diff.effects import get_effect, get_library_stages, has_no_effect
from skyrl_inspect.diff.parting import Difference, StepPart

_ROUNDING = 1e-4
"""Gap below which numbers differ by rounding, relative or in a log-prob."""
_COARSE = 0.3
"""Gap of a log-prob that no rounding makes."""
_MOST_PROBABLE = 90
_SLIGHT = 40
"""Scores from which a cause counts as likely, and as possible."""


@dataclass(frozen=True)
class ChangedItem:
    """Something that is not the same in both runs.

    Args:
        group: `setting`, `library`, `data`, `tokenizer`, `environment`, `code` or `machine`.
        name: full name of a setting, name of a library, and so on.
        a, b: what each run has; None: nothing, or it is not recorded.
        since: the first step for which it differs.
        until: the last one, where a later start made it the same; None: it differs to the end.
    """

    group: str
    name: str
    a: object
    b: object
    since: int = 1
    until: int | None = None

    @property
    def title(self) -> str:
        """The name with its group, where the name alone does not tell it."""
        return f"library {self.name}" if self.group == "library" else self.name

    def __str__(self) -> str:
        steps = f" (from step {self.since} on)" if self.since > 1 else ""
        if self.until is not None:
            steps = f" (in steps {self.since} to {self.until})"
        return f"{self.title}: {_shorten(self.a)} against {_shorten(self.b)}{steps}"


@dataclass(frozen=True)
class Cause:
    """Possible cause of a difference.

    Args:
        name: a setting, a library, or such as `training data`.
        change: what differs between the runs, in words.
        why: what speaks for it.
        score: from 0, larger is likelier.
    """

    name: str
    change: str
    why: str
    score: int

    @property
    def text(self) -> str:
        """The change with its name."""
        return self.change if self.change.startswith(self.name) else f"{self.name}: {self.change}"

    @property
    def likelihood(self) -> str:
        """`likely`, `possible` or `unlikely`."""
        return "likely" if self.score >= _MOST_PROBABLE else "possible" if self.score >= _SLIGHT else "unlikely"


def _shorten(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


@dataclass(frozen=True)
class Evidence:
    """Evidence besides the differences.

    Args:
        weights_before: True: the engines got equal weights before the step; None: that is not recorded.
        data_row_differs: True: the data of the sample's prompt differ; None: it is not known.
        same_rows: True: both data have the same rows, in another order.
        engine_gaps: largest difference of rollout and trainer log-probs in this step, of either run, where recorded.
        asynchronous: both runs are asynchronous and train groups in the order in which they finish.
        constant_rate: neither learning rate falls towards the last step.
        unrecorded: of `data`, `tokenizer`, `environment`: what one of the runs does not record.
    """

    weights_before: bool | None = None
    data_row_differs: bool | None = None
    same_rows: bool = False
    engine_gaps: tuple[float, float] | None = None
    asynchronous: bool = False
    constant_rate: bool = False
    unrecorded: frozenset[str] = frozenset()


def rank_causes(difference: Difference, changes: Sequence[ChangedItem], evidence: Evidence) -> list[Cause]:
    """Rank possible causes of a difference, most likely first; at least one."""
    found = [cause for change in changes if (cause := _make_cause(change, difference, evidence)) is not None]
    found += _find_causes_without_change(difference, changes, evidence)
    found.append(_UNEXPLAINED)
    return sorted(found, key=lambda cause: -cause.score)  # stable: settings stay in their order


def _make_cause(change: ChangedItem, difference: Difference, evidence: Evidence) -> Cause | None:
    if change.since > max(1, difference.step):
        return None  # takes effect later
    if change.until is not None and change.until < difference.step:
        return None  # it took effect in steps that are equal
    judge = {
        "setting": _setting,
        "library": _library,
        "data": _data,
        "tokenizer": _tokenizer,
        "environment": _environment,
        "code": _code,
        "machine": _machine,
    }[change.group]
    score, why = judge(change, difference, evidence)
    if score and 1 < change.since == difference.step:
        score, why = score + 50, f"it changed at the start that began with this step; {why}"
    return Cause(change.title, str(change), why, score) if score else None


_COMPUTES = {
    StepPart.START: "the weights before step 1",
    StepPart.PROMPTS: "the prompts of a step",
    StepPart.GENERATION: "what engines sample",
    StepPart.ENVIRONMENT: "what environments answer",
    StepPart.SCORES: "the trainer's log-probs",
    StepPart.ADVANTAGES: "advantages and weights of tokens",
    StepPart.UPDATE: "the update",
    StepPart.WEIGHTS: "the weights after the update",
    StepPart.EVALUATION: "evaluations",
}


def _setting(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    if has_no_effect(change.name):
        return 0, ""
    stage, effect = difference.stage, get_effect(change.name)
    why = f"it affects {_COMPUTES[stage]}, where the runs diverge"
    if change.name.startswith("trainer.policy.model.path") and evidence.weights_before:
        return 0, ""  # two places of the same weights
    if stage in effect.stages:
        score = 100 - 10 * effect.stages.index(stage)
    elif min(effect.stages) < stage:
        score, why = 30, f"it affects an earlier stage of the step and may become visible in {_COMPUTES[stage]}"
    else:
        return 0, ""
    special = _get_special_score(change.name, difference, evidence)
    if special is not None:
        return special
    if effect.rounding and _is_coarse(difference):
        return score - 20, f"{why}, though the gap is more than rounding"
    if not effect.rounding and _is_rounding(difference):
        return score - 40, f"{why}, though the gap is no more than rounding"
    if effect.rounding and _is_rounding(difference):
        return score + 5, f"{why}, and it changes the order or precision of sums, which fits the gap"
    return score, why


def _get_special_score(name: str, difference: Difference, evidence: Evidence) -> tuple[int, str] | None:
    """Return score and reason where the kind of the difference tells a setting from others of its stage."""
    last = name.rpartition(".")[2]
    match difference.kind:
        case "order" if name == "trainer.seed":
            return 130, "the order of prompts depends on the seed"
        case "order" | "number" if last in ("train_batch_size", "n_samples_per_prompt"):
            return 135, "it is the number of prompts or samples of a step"
        case "lr" if last in ("lr", "scheduler", "num_warmup_steps"):
            score = 140 - 5 * ("lr", "scheduler", "num_warmup_steps").index(last)
            return score, "the learning rate itself is the first number that differs"
        case "lr" if last in ("max_training_steps", "epochs") and not evidence.constant_rate:
            return 110, "the learning rate falls towards the last step, and it differs"
        case _ if last in ("max_training_steps", "epochs"):
            return 0, ""  # the schedule of learning rates is all that knows of it, and the rates are equal
        case "weights" if name == "generator.model_dtype" and difference.stage is StepPart.START:
            return 130, "engines receive their weights in this dtype, so all tensors differ"
        case "few weights" if name.startswith("trainer."):
            return 30, "it would change all tensors, but only few differ"
        case "prompt id" if not name.endswith("disable_fast_tokenizer"):
            return 20, "the text of the prompt is the same, but its tokens differ"
    return None


def _is_rounding(difference: Difference) -> bool:
    gap = difference.gap if difference.kind == "log-prob" else difference.relative_gap
    return gap is not None and gap < _ROUNDING


def _is_coarse(difference: Difference) -> bool:
    return difference.kind == "log-prob" and difference.gap is not None and difference.gap > _COARSE


def _library(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    stages = get_library_stages(change.name)
    if difference.stage not in stages:
        return (15 if stages else 5), f"it does not take part in {_COMPUTES[difference.stage]} directly"
    score = 80 - len(stages) + (10 if _is_rounding(difference) else 0)
    return score, f"it computes {_COMPUTES[difference.stage]}, where the runs diverge"


def _data(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    prompts = difference.stage is StepPart.PROMPTS
    if evidence.same_rows:
        return (125 if prompts else 20), "both have the same rows in a different order"
    if evidence.data_row_differs and difference.stage in (StepPart.PROMPTS, StepPart.ENVIRONMENT):
        if difference.kind == "prompt id":
            return 90, "the row of this sample's prompt differs, though its text is the same"
        return 150, "the row of this sample's prompt differs"
    if evidence.data_row_differs is False:
        return (
            60 if difference.kind in ("order", "number") else 15
        ), "some rows differ, but not the one of this prompt"
    if prompts:
        return 120, "the rows of the data differ"
    return (70 if difference.stage is StepPart.ENVIRONMENT else 15), "the rows of the data differ"


def _tokenizer(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    if difference.kind == "prompt id":
        return 150, "the same text has different tokens"
    if difference.kind == "text":
        return 145, "the same tokens have a different text"
    if difference.kind == "prompt text":
        return 115, "the chat template or the special tokens render the prompt to a different text"
    scores = {StepPart.PROMPTS: 80, StepPart.GENERATION: 45, StepPart.ENVIRONMENT: 85, StepPart.EVALUATION: 60}
    return scores.get(difference.stage, 0), "environments and engines convert text with it"


def _environment(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    scores = {StepPart.ENVIRONMENT: 120, StepPart.EVALUATION: 70, StepPart.PROMPTS: 60}
    if difference.kind == "prompt text":
        return 85, "an environment may write the first messages"
    return scores.get(difference.stage, 0), f"its code produces {_COMPUTES[StepPart.ENVIRONMENT]}"


def _code(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    return 55, "the code of the framework differs, which may change anything"


def _machine(change: ChangedItem, difference: Difference, evidence: Evidence) -> tuple[int, str]:
    if difference.stage in (StepPart.PROMPTS, StepPart.ENVIRONMENT, StepPart.ADVANTAGES):
        return 5, "it changes only the rounding"
    return (78 if _is_rounding(difference) else 50), "it changes the rounding of sums"


def _find_causes_without_change(
    difference: Difference, changes: Sequence[ChangedItem], evidence: Evidence
) -> Iterator[Cause]:
    """Yield causes that no recorded setting or version tells: faults, order of asynchronous training, what a run does
    not record."""
    if difference.kind == "few weights":
        when = "before step 1" if difference.step == 0 else f"after step {difference.step}"
        why = (
            "everything computed before is equal and only few tensors differ, which no setting causes: a "
            "corrupted copy, file "
        )
        yield Cause(
            f"{difference.quantity} at the sync {when}", difference.note, f"{why}or memory, or a fault of a sync", 140
        )
    if difference.stage is StepPart.GENERATION and difference.kind != "version id":
        yield from _find_engine_cause(difference, evidence)
    if evidence.asynchronous and (
        difference.kind in ("order", "version id") or difference.stage is StepPart.GENERATION
    ):
        yield Cause(
            "order of asynchronous training",
            "groups are trained in the order in which they finish",
            "two such runs are not reproducible; trainer.fully_async.order=exact makes them reproducible",
            95 if difference.kind in ("order", "version id") else 45,
        )
    suspects = {
        "data": ("training data", {"prompt text": 70, "order": 50, "number": 50}),
        "tokenizer": ("tokenizer", {"prompt id": 75, "text": 75, "prompt text": 60}),
    }
    for group, (name, scores) in suspects.items():
        if group in evidence.unrecorded and difference.kind in scores:
            yield Cause(name, "not recorded by both runs", "it would explain this", scores[difference.kind])
    if "environment" in evidence.unrecorded and difference.stage is StepPart.ENVIRONMENT:
        yield Cause("environment", "its code is not recorded by both runs", "it would explain this", 70)


def _find_engine_cause(difference: Difference, evidence: Evidence) -> Iterator[Cause]:
    """Yield the engine itself: weights that changed after they were verified, or arithmetic that is not repeatable."""
    score, why = 42, "no other recorded difference affects this"
    if evidence.weights_before:
        why = "the engines were sent equal weights"
    gaps = evidence.engine_gaps
    if gaps is not None and max(gaps) > 10 * min(gaps) and max(gaps) > _ROUNDING:
        which = "A" if gaps[0] > gaps[1] else "B"
        score = 95
        why += f"; in {which} engine and trainer differ by {max(gaps):.2g}, in the other by {min(gaps):.2g}"
        yield Cause(f"weights in the engine of {which}", "not the trainer's weights", why, score)
        return
    yield Cause("arithmetic of the engine", "not reproducible, or its weights changed after the sync", why, score)


_UNEXPLAINED = Cause(
    "nothing recorded",
    "no setting, version, data, tokenizer or environment that affects this differs",
    "a computation that is not reproducible (GPU kernels, the order of requests), an unrecorded file, or a memory "
    "fault",
    35,
)
