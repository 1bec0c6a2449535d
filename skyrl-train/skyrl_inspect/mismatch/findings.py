"""Findings from the measured numbers: faults between engine and trainer, and settings that fix them. Decisions
only."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from skyrl_inspect.mismatch.cells import Cell, EngineName, TrainerDtype
from skyrl_inspect.mismatch.explanations import Explanation

FLOORS = {"float32": 1e-4, "float16": 2e-4, "bfloat16": 1e-3}
"""Mean differences that are not asked about in an engine of this format: ten times what sums of float32 in another
order make of log-probs around 10, and the smallest that is worth a sentence in the others."""

ROUNDING_FACTOR = {"float32": 0.0, "float16": 2.5 / 8, "bfloat16": 2.5}
"""An engine may differ from the trainer in float32 by so many times what bfloat16 makes of the trainer itself on the
same tokens. 1 is expected; kernels that round in more places may come to 2. float16 has three bits more: an eighth."""

NEGLIGIBLE = 1e-3
"""A mean difference below which no format is worth changing: importance ratios are right to a tenth of a percent."""

CLIPPED = 1e-3
"""Share of tokens outside the clip range before any training that is worth a sentence: clipping, which is to hold back
one token in a hundred or so that learning moved, would hold back many that only rounding moved."""

EFFECTIVE = 0.99
"""Effective share of samples below which importance weights cost data."""

THRESHOLDS = (
    f"rounding: a mean difference to the trainer in float32 of at most {FLOORS['float32']:g} for a float32 engine; "
    f"{ROUNDING_FACTOR['bfloat16']:g} times what bfloat16 makes of the trainer's own log-probs for a bfloat16 engine "
    f"(at least {FLOORS['bfloat16']:g}), an eighth of it for float16",
    f"worth changing a number format: {NEGLIGIBLE:g} on average (importance ratios off by a tenth of a percent)",
    f"outliers: more than one token in {1 / CLIPPED:.0f} outside the clip range, or an effective sample size below "
    f"{EFFECTIVE:.0%}",
)

Severity = Literal["error", "warning", "ok"]


@dataclass(frozen=True)
class Finding:
    """Text of one or two sentences for the user."""

    severity: Severity
    """`error`: engine and trainer do not compute the same thing. `warning`: they do, in numbers that differ more than
    they need to. `ok`: nothing to do."""

    kind: str
    """A short name of it, for programs."""

    text: str


@dataclass(eq=False, kw_only=True)
class Measured:
    """Cells of one engine with the trainer's log-probs."""

    name: EngineName
    cells: list[Cell] = field(default_factory=list)
    """One a sampling setting."""

    canary: Cell | None = None
    explain: Callable[[Cell], Explanation | None] = lambda cell: None
    """Asked for cells that rounding does not explain."""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Settings of training of the run under examination."""

    dtype: TrainerDtype
    clip_low: float = 0.2
    clip_high: float = 0.2


def compute_tolerance(cell: Cell) -> float:
    """The mean difference to the trainer in float32 that the engine's number format explains, on these tokens."""
    dtype = cell.engine.dtype if cell.engine.dtype in FLOORS else "bfloat16"
    return max(FLOORS[dtype], ROUNDING_FACTOR[dtype] * cell.rounding)


def find_all(engines: Sequence[Measured], trainer: Trainer) -> list[Finding]:
    """Derive all findings, errors first; a single `ok` if nothing is found."""
    found: list[Finding] = []
    sound: list[Measured] = []
    for engine in engines:
        wrong = _find_wrong_computation(engine)
        found += wrong
        if not wrong and engine.cells:
            sound.append(engine)
    for group in _group_by_backend(sound).values():
        found += _find_better_formats(group, trainer)
    found += _find_outliers(sound, trainer)
    order: dict[Severity, int] = {"error": 0, "warning": 1, "ok": 2}
    return sorted(found, key=lambda finding: order[finding.severity]) or [_make_ok_finding(engines)]


# ---- engine and trainer compute different things


def _find_wrong_computation(engine: Measured) -> list[Finding]:
    """Fixed tokens first: no sampling touches them, so what differs there is the model itself."""
    if engine.canary is not None and engine.canary.mean("float32") > compute_tolerance(engine.canary):
        return [_find_wrong_model(engine, engine.canary)]
    suspects = [cell for cell in engine.cells if cell.mean("float32") > compute_tolerance(cell)]
    if engine.canary is None and suspects and len(suspects) == len(engine.cells):
        # Something in every cell: the plainest tells most.
        plain = min(suspects, key=lambda cell: len(cell.sampling.params))
        if _find_explanation(engine, plain) is None and not plain.num_not_finite:
            return [_find_wrong_model(engine, plain)]
    found: dict[str, list[Cell]] = {}
    explanations: dict[str, Explanation | None] = {}
    for cell in suspects:
        explanation = None if cell.num_not_finite else _find_explanation(engine, cell)
        kind = "not finite" if cell.num_not_finite else explanation.kind if explanation else "unexplained"
        if explanation and explanation.temperature is not None:
            kind += f" {explanation.temperature / cell.sampling.temperature:.2f}"
        found.setdefault(kind, []).append(cell)
        explanations.setdefault(kind, explanation)
    return [_find_processed_log_probs(engine, cells, explanations[kind]) for kind, cells in found.items()]


def _find_explanation(engine: Measured, cell: Cell) -> Explanation | None:
    """Find the mistake that explains a cell down to rounding, or to a fifth of the gap and less."""
    found = engine.explain(cell)
    if found is None or found.left > max(compute_tolerance(cell), cell.mean("float32") / 5):
        return None
    if found.temperature is not None and abs(found.temperature / cell.sampling.temperature - 1) < 0.01:
        return None
    return found


def _find_wrong_model(engine: Measured, cell: Cell) -> Finding:
    gap, allowed = cell.mean("float32"), compute_tolerance(cell)
    what = (
        f"{engine.name}: its log-probs of {len(cell.rollout)} {'fixed' if cell is engine.canary else 'sampled'} tokens"
    )
    what += f" differ from the trainer's by {gap:.3g} on average, and rounding explains {allowed:.2g}."
    if cell.num_not_finite:
        return Finding(
            "error",
            "not finite",
            f"{engine.name}: {cell.num_not_finite} of {len(cell.rollout)} log-probs of fixed tokens are no finite "
            f"numbers: {engine.name.dtype} overflows in this model; use generator.model_dtype=bfloat16 or float32.",
        )
    explanation = _find_explanation(engine, cell)
    if explanation is not None and explanation.temperature is not None:
        return Finding(
            "error",
            "temperature",
            f"{what} They are those of logits divided by {explanation.temperature:.3g} where "
            f"{cell.sampling.temperature:g} was asked for: look for a scale of logits (logit_scale, logits_scaling, a "
            "default temperature) that only one of the two applies.",
        )
    first = cell.positions == 1
    if first.any():
        of_first = (cell.rollout - cell.train["float32"])[first].abs().mean().item()
        if of_first <= max(allowed, gap / 20):
            return Finding(
                "error",
                "attention",
                f"{what} The second token of a text agrees ({of_first:.2g}), later ones do not: while attention sees "
                "one position both compute the same, so embeddings, feed-forward layers and output layer are the same, "
                "and what differs is in attention: positions (rope_theta, rope_scaling), a sliding window, or its "
                "query and key weights. Compare trainer.policy.model_config_kwargs and generator.engine_init_kwargs "
                "with the model's config.json.",
            )
    return Finding(
        "error",
        "weights",
        f"{what} That is no rounding: the engine computes with other weights (or another model). Check that "
        "generator.model_name (for a server: what it was started with) is trainer.policy.model.path, that the files "
        "are the same, and whether output layer and embedding are tied in both; if it comes after a weight sync, see "
        "generator.weight_sync_verification.",
    )


def _find_processed_log_probs(engine: Measured, cells: list[Cell], explanation: Explanation | None) -> Finding:
    """Log-probs that are the trainer's but for something that was done to them."""
    where = f"{engine.name}, {_format_list([cell.sampling.name for cell in cells])}"
    gap = max(cell.mean("float32") for cell in cells)
    if any(cell.num_not_finite for cell in cells):
        number = sum(cell.num_not_finite for cell in cells)
        return Finding(
            "error",
            "not finite",
            f"{where}: {number} log-probs are no finite numbers. Such tokens cannot be trained on: use "
            "generator.model_dtype=bfloat16 or float32, or another engine.",
        )
    if explanation is None:
        return Finding(
            "error",
            "unexplained",
            f"{where}: log-probs differ from the trainer's by {gap:.3g} on average, more than rounding explains "
            f"({max(map(compute_tolerance, cells)):.2g}), though the log-probs of fixed tokens may agree: neither "
            "truncation, penalties nor a temperature explain it. Look at the worst tokens; until it is understood, do "
            "not train with this engine's log-probs (trainer.algorithm.off_policy_correction), or use another.",
        )
    if explanation.kind == "temperature":
        temperature, asked = explanation.temperature or 1.0, cells[0].sampling.temperature
        cause = (
            f"the temperature {asked:g} is not applied to them"
            if math.isclose(temperature, 1.0, rel_tol=0.02)
            else f"they are those of the temperature {temperature:.3g}, not {asked:g}"
        )
        cure = (
            "Have the engine report log-probs of the distribution it is asked for (vLLM: logprobs_mode; a server: its "
            "--override-generation-config), or set generator.sampling_params.temperature to what it uses: the trainer "
            "divides its logits by that setting."
        )
    else:
        cause = {
            "truncation": "they are processed after truncation (top_p, top_k, min_p): the kept tokens' probabilities "
            "are made to sum to 1",
            "penalty": "they are processed after repetition_penalty",
            "penalty and truncation": "they are processed after repetition_penalty and truncation",
        }[explanation.kind]
        cure = (
            "The trainer's are of the whole distribution, so every ratio is off by that factor. Have the engine report "
            "log-probs from before (vLLM: engine_init_kwargs.logprobs_mode), or draw from the whole distribution: "
            "generator.sampling_params.top_p=1 top_k=-1 min_p=0 repetition_penalty=1."
        )
    return Finding(
        "error",
        explanation.kind,
        f"{where}: log-probs differ from the trainer's by up to {gap:.3g} on average because {cause} (this leaves "
        f"{explanation.left:.2g}). {cure}",
    )


# ---- they compute the same, in other numbers


def _find_better_formats(group: list[Measured], trainer: Trainer) -> list[Finding]:
    """Report engines whose gap is at least three times smaller with other number formats of engine and trainer."""
    gaps = {
        (engine.name.dtype, dtype): engine.cells[0].mean(dtype) for engine in group for dtype in engine.cells[0].train
    }
    found = []
    for engine in group:
        own = engine.name.dtype, trainer.dtype
        better = [pair for pair in gaps if gaps[pair] <= gaps[own] / 3]
        if gaps[own] <= NEGLIGIBLE or not better:
            continue
        one_change = [pair for pair in better if (pair[0] == own[0]) != (pair[1] == own[1])]
        choices = [f"{_list_changes(own, pair)} leaves {gaps[pair]:.2g}" for pair in one_change or better]
        if own[1] == "float32" and ("float32", "float32") not in gaps:
            choices.append("generator.model_dtype=float32 was not measured here")
        found.append(
            Finding(
                "warning",
                "number format",
                f"{engine.name} engine and {trainer.dtype} trainer differ by {gaps[own]:.2g} on average, by rounding "
                f"alone: {'; '.join(choices)}. If the formats stay, correct for it: "
                "trainer.algorithm.off_policy_correction.tis_ratio_type=token.",
            )
        )
    return found


def _list_changes(own: tuple[str | None, str], pair: tuple[str | None, str]) -> str:
    """The settings that lead from one pair of formats to another."""
    engine = [f"generator.model_dtype={pair[0]}"] if pair[0] != own[0] else []
    return " ".join(
        [*engine, *([f"trainer.bf16={'true' if pair[1] == 'bfloat16' else 'false'}"] * (pair[1] != own[1]))]
    )


def _find_outliers(engines: Sequence[Measured], trainer: Trainer) -> list[Finding]:
    """Report tokens that leave the clip range, and the cost of importance weights: for each engine its worst cell."""
    found = []
    for engine in engines:
        gaps = [(cell, cell.gap(trainer.dtype, trainer.clip_low, trainer.clip_high)) for cell in engine.cells]
        cell, gap = max(gaps, key=lambda pair: pair[1].outside_clip if pair[1] else 0.0)
        if gap is not None and (gap.outside_clip > CLIPPED or gap.ess < EFFECTIVE):
            number = f"one token in {1 / gap.outside_clip:.0f}" if gap.outside_clip else "no token"
            found.append(f"{engine.name}, {cell.sampling.name}: {number} (effective sample size {gap.ess:.1%})")
    if not found:
        return []
    limit = min(-math.log(1 - trainer.clip_low) if trainer.clip_low < 1 else math.inf, math.log(1 + trainer.clip_high))
    return [
        Finding(
            "warning",
            "outliers",
            f"Tokens that are off by more than {limit:.2g} leave the clip range before any training. "
            f"{'; '.join(found)}. Try "
            "trainer.algorithm.off_policy_correction.tis_ratio_type=token, which weighs tokens by their ratio, or "
            "token_mask_is_threshold_high, which leaves the worst out; generator.model_dtype=float32 if it rounds. In "
            "a mixture of experts a rounded router picks other experts: a few tokens are far off, the rest is not; "
            "trainer.policy.routing_replay=R3 replays the engine's choice (this command then shows the gap before and "
            "after).",
        )
    ]


def _make_ok_finding(engines: Sequence[Measured]) -> Finding:
    worst = max((cell.mean("float32") for engine in engines for cell in engine.cells), default=None)
    if worst is None:
        return Finding("error", "not measured", "No engine was measured: see what was left out and why.")
    return Finding(
        "ok", "agreement", f"Engines and trainer agree: the mean difference is at most {worst:.2g}. Nothing to change."
    )


def _group_by_backend(engines: Sequence[Measured]) -> dict[tuple[str, str, str], list[Measured]]:
    groups: dict[tuple[str, str, str], list[Measured]] = {}
    for engine in engines:
        groups.setdefault((engine.name.backend, engine.name.attention, engine.name.url), []).append(engine)
    return groups


def _format_list(names: Sequence[str]) -> str:
    return ", ".join(names)
