"""The whole report: engines' answers in; cells with the trainer's log-probs, and findings, out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_inspect.mismatch.answers import EngineAnswers, Sampling
from skyrl_inspect.mismatch.cells import Cell, EngineName, TrainerDtype
from skyrl_inspect.mismatch.explanations import Explanation, find_best_explanation
from skyrl_inspect.mismatch.findings import Finding, Measured, Trainer, find_all
from skyrl_inspect.mismatch.gap import Gap
from skyrl_inspect.mismatch.routing_findings import find_routing_differences
from skyrl_inspect.mismatch.scoring import Reference, TrainerModel, build_bfloat16_model, build_reference_model
from skyrl_train.config import SkyRLConfig

_FIXED_TOKENS = Sampling("fixed tokens", {"temperature": 1.0})


@dataclass(frozen=True, kw_only=True)
class Report:
    """Measured numbers and findings."""

    model: str
    trainer: Trainer
    engines: list[Measured]
    findings: list[Finding]
    not_measured: list[tuple[str, str]]
    """Combinations that were not measured, each with the reason."""

    @property
    def cells(self) -> list[Cell]:
        """Cells of all engines, the fixed tokens of each engine first."""
        return _build_cells(self.engines)

    def gap(self, cell: Cell) -> Gap | None:
        """Return the gap of a cell to the trainer under its settings; None if no token has a number."""
        return cell.gap(self.trainer.dtype, self.trainer.clip_low, self.trainer.clip_high)

    def replayed_gap(self, cell: Cell) -> Gap | None:
        """Return the gap of a cell where the trainer replays the engine's routes; None if it returned none."""
        return cell.replayed_gap(self.trainer.dtype, self.trainer.clip_low, self.trainer.clip_high)

    def above(self, limit: float) -> list[Cell]:
        """Return the cells whose mean difference is above `limit` or not finite."""
        return [cell for cell in self.cells if not cell.mean(self.trainer.dtype) <= limit]


def make_report(
    cfg: SkyRLConfig,
    said: Sequence[tuple[EngineName, EngineAnswers]],
    samplings: Sequence[Sampling],
    not_measured: Sequence[tuple[str, str]] = (),
) -> Report:
    """Score all answers with the trainer's model, in bfloat16 and then in float32 (one at a time in memory), and derive
    the findings.

    Args:
        cfg: the settings of the run that is asked about.
        said: what each engine answered.
        samplings: the settings that were asked for.
        not_measured: what could not be, and why.
    """
    trainer = Trainer(
        dtype="bfloat16" if cfg.trainer.bf16 else "float32",
        clip_low=cfg.trainer.algorithm.eps_clip_low,
        clip_high=cfg.trainer.algorithm.eps_clip_high,
    )
    engines = [_collect_measured(name, answers, samplings) for name, answers in said]
    return Report(
        model=cfg.trainer.policy.model.path,
        trainer=trainer,
        engines=engines,
        findings=_score_and_explain(cfg, engines, trainer),
        not_measured=[
            *not_measured,
            *((f"{name}, {what}", reason) for name, answers in said for what, reason in answers.refused.items()),
        ],
    )


def _collect_measured(name: EngineName, said: EngineAnswers, samplings: Sequence[Sampling]) -> Measured:
    cells = [
        Cell(engine=name, sampling=sampling, answers=said.answers[sampling.name])
        for sampling in samplings
        if sampling.name in said.answers
    ]
    canary = said.canary and Cell(engine=name, sampling=_FIXED_TOKENS, answers=said.canary)
    return Measured(name=name, cells=cells, canary=canary)


def _score_and_explain(cfg: SkyRLConfig, engines: Sequence[Measured], trainer: Trainer) -> list[Finding]:
    """Add the trainer's log-probs to every cell, and derive the findings."""
    cells = _build_cells(engines)
    if not cells:
        return find_all([], trainer)
    with build_bfloat16_model(cfg) as model:
        for cell in cells:
            _add_scores(cell, "bfloat16", model)
    with build_reference_model(cfg) as reference:
        for cell in cells:
            _add_scores(cell, "float32", reference)
        explainer = _Explainer(reference)
        for engine in engines:
            engine.explain = explainer
        found, of_routing = find_all(engines, trainer), find_routing_differences(engines, trainer)
        return [*(each for each in found if each.severity != "ok" or not of_routing), *of_routing]


def _build_cells(engines: Sequence[Measured]) -> list[Cell]:
    return [cell for engine in engines for cell in [engine.canary, *engine.cells] if cell is not None]


def _add_scores(cell: Cell, dtype: TrainerDtype, model: TrainerModel) -> None:
    """Add the trainer's log-probs in one number format, and those over the engine's experts if it returned them."""
    temperature = cell.sampling.temperature
    cell.train[dtype] = torch.cat(model.log_probs(cell.answers, temperature))
    if cell.answers.routes is not None:
        log_probs, cell.differing[dtype] = model.replayed(cell.answers, temperature)
        cell.replayed[dtype] = torch.cat(log_probs)


class _Explainer:
    """Compute `find_best_explanation` with the trainer's model; each cell is examined once."""

    def __init__(self, reference: Reference):
        self._reference = reference
        self._found: dict[Cell, Explanation | None] = {}

    def __call__(self, cell: Cell) -> Explanation | None:
        if cell not in self._found:
            self._found[cell] = find_best_explanation(self._reference, cell.answers, cell.sampling)
        return self._found[cell]
