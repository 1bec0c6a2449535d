"""A report for people (markdown) and for programs (plain values for JSON)."""

import textwrap
from collections.abc import Callable
from dataclasses import asdict

from skyrl_inspect.mismatch.cells import Cell, TrainerDtype
from skyrl_inspect.mismatch.findings import THRESHOLDS, Finding, compute_tolerance
from skyrl_inspect.mismatch.report import Report

Decode = Callable[[list[int]], str]
"""Token ids to text."""

_LINE = 120


def format_markdown(report: Report, decode: Decode, num_worst: int) -> str:
    """Format findings, the table of cells, number formats against each other, the worst tokens, refusals."""
    parts = [
        f"# Train/rollout log-probs of {report.model}",
        f"Differences are |trainer - engine| in nats, over the tokens that the engine wrote. The trainer computes in "
        f"{report.trainer.dtype}.",
        "## Findings",
        *map(_format_finding, report.findings),
    ]
    if report.cells:
        parts += ["## Cells", _format_table(report), "## Number formats", _format_number_formats(report)]
    if any(cell.replayed for cell in report.cells):
        parts += ["## Routing replay", _format_replay(report)]
    if report.cells and num_worst:
        parts += ["## Worst tokens", _format_worst_tokens(report, decode, num_worst)]
    if report.not_measured:
        lines = "\n".join(f"- {what}: {_get_first_line(why)}" for what, why in report.not_measured)
        parts += ["## Not measured", lines]
    parts += ["## Thresholds", "\n".join(_format_wrapped(f"- {line}") for line in THRESHOLDS)]
    return "\n\n".join(parts) + "\n"


def to_plain(report: Report, decode: Decode, num_worst: int) -> dict[str, object]:
    """Convert a report to JSON values. Non-finite numbers become null."""
    return {
        "model": report.model,
        "trainer": asdict(report.trainer),
        "findings": [asdict(finding) for finding in report.findings],
        "cells": [_to_plain_cell(report, cell, decode, num_worst) for cell in report.cells],
        "not_measured": [{"what": what, "why": why} for what, why in report.not_measured],
        "thresholds": list(THRESHOLDS),
    }


def _format_finding(finding: Finding) -> str:
    return _format_wrapped(f"- **{finding.severity}** ({finding.kind}): {finding.text}")


def _format_wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _LINE, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def _format_table(report: Report) -> str:
    lines = [
        "| engine | sampling | tokens | mean | p99 | max | KL(rollout‖train) | outside clip | effective samples |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in report.cells:
        gap = report.gap(cell)
        if gap is None:
            numbers = [str(cell.num_not_finite), *["no number"] * 6]
        else:
            numbers = [
                f"{gap.num_tokens} ({cell.num_not_finite} without a number)"
                if cell.num_not_finite
                else str(gap.num_tokens),
                *(f"{value:.2e}" for value in (gap.mean, gap.p99, gap.max, gap.kl)),
                f"{gap.outside_clip:.2%}",
                f"{gap.ess:.2%}",
            ]
        lines.append("| " + " | ".join([str(cell.engine), cell.sampling.name, *numbers]) + " |")
    return "\n".join(lines)


def _format_number_formats(report: Report) -> str:
    """Format the mean difference of each engine's first cell to the trainer in either format."""
    trainers: tuple[TrainerDtype, ...] = ("float32", "bfloat16")
    lines = ["| engine | trainer in float32 | trainer in bfloat16 | rounding explains |", "|---|---:|---:|---:|"]
    for engine in report.engines:
        cell = next(iter(engine.cells), engine.canary)
        if cell is not None:
            means = " | ".join(f"{cell.mean(dtype):.2e}" for dtype in trainers)
            lines.append(f"| {engine.name} | {means} | {compute_tolerance(cell):.1e} |")
    return "\n".join(lines)


def _format_replay(report: Report) -> str:
    """Format the gap of each cell before and after replay of the engine's experts (`routing_replay=R3`)."""
    lines = [
        "| engine | sampling | other experts | mean | with R3 | p99 | with R3 | KL(rollout‖train) | with R3 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for cell in report.cells:
        before, after = report.gap(cell), report.replayed_gap(cell)
        if before is None or after is None:
            continue
        pairs = ((before.mean, after.mean), (before.p99, after.p99), (before.kl, after.kl))
        numbers = [f"{cell.differing[report.trainer.dtype]:.2%}", *(f"{one:.2e} | {two:.2e}" for one, two in pairs)]
        lines.append("| " + " | ".join([str(cell.engine), cell.sampling.name, *numbers]) + " |")
    return "\n".join(lines)


def _format_worst_tokens(report: Report, decode: Decode, count: int) -> str:
    """Format the worst tokens of each engine's worst cell."""
    lines = [
        "| engine | sampling | answer | position | token | engine | trainer |",
        "|---|---|---:|---:|---|---:|---:|",
    ]
    for engine in report.engines:
        cells = [cell for cell in (engine.canary, *engine.cells) if cell is not None]
        if not cells:
            continue
        cell = max(cells, key=lambda cell: cell.mean(report.trainer.dtype))
        for token in cell.worst(report.trainer.dtype, count):
            text = repr(decode([token.token_id])).replace("|", "\\|")
            lines.append(
                f"| {cell.engine} | {cell.sampling.name} | {token.answer} | {token.position} "
                f"| {text} ({token.token_id}) | {token.rollout:.4f} | {token.train:.4f} |"
            )
    return "\n".join(lines)


def _to_plain_cell(report: Report, cell: Cell, decode: Decode, num_worst: int) -> dict[str, object]:
    gap, replayed = report.gap(cell), report.replayed_gap(cell)
    return {
        "engine": asdict(cell.engine),
        "sampling": {"name": cell.sampling.name, **cell.sampling.params},
        "gap": None if gap is None else asdict(gap),
        "gap_with_routing_replay": None if replayed is None else asdict(replayed),
        "other_experts": cell.differing.get(report.trainer.dtype),
        "without_a_number": cell.num_not_finite,
        "mean_by_trainer_dtype": {dtype: _format_number(cell.mean(dtype)) for dtype in cell.train},
        "rounding_explains": compute_tolerance(cell),
        "worst_tokens": [
            {**asdict(token), "rollout": _format_number(token.rollout), "text": decode([token.token_id])}
            for token in cell.worst(report.trainer.dtype, num_worst)
        ],
    }


def _format_number(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _get_first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
