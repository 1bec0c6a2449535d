"""Settings that the planner chooses: `trainer.placement.offload=auto` and `trainer.gradient_checkpointing=auto`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.config import OffloadMode, apply_overrides
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.memory_plan.backends import Role
from skyrl_train.memory_plan.devices import Device, find_gpu
from skyrl_train.memory_plan.memory import MemoryPlan, Phase, estimate_memory
from skyrl_train.memory_plan.model_shape import ModelShape
from skyrl_train.memory_plan.shapes import load_shapes

MARGIN = 1.15
"""Factor on estimated bytes of models: measured peaks may be higher by this much without a warning."""

OFFLOAD = "trainer.placement.offload"
CHECKPOINTING = "trainer.gradient_checkpointing"
_ENGINE_FRACTION = "generator.gpu_memory_utilization"


@dataclass(frozen=True)
class MemoryDecision:
    """Settings that the planner chose for a run."""

    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Dotted name -> value."""

    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    """Dotted name -> why the setting has its value, also where a user set it. Empty: nothing was to be decided."""

    def apply(self, cfg: SkyRLConfig) -> SkyRLConfig:
        """Return the settings with the decision. Sections that do not change are shared."""
        return apply_overrides(cfg, self.settings) if self.reasons else cfg

    def list_savings(self) -> list[str]:
        """Return the overrides with which a run needs less memory than with this decision."""
        savings = {OFFLOAD: "all", CHECKPOINTING: True}
        return [
            f"{name}={str(value).lower()}" for name, value in savings.items() if self.settings.get(name, value) != value
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name}={str(self.settings[name]).lower()}: {why}" for name, why in self.reasons.items())

    def __or__(self, other: "MemoryDecision") -> "MemoryDecision":
        return MemoryDecision({**self.settings, **other.settings}, {**self.reasons, **other.reasons})


def decide_memory_of_run(cfg: SkyRLConfig) -> MemoryDecision:
    """Decide for the models of a run and the GPUs of this machine. Where nothing is to be decided, no model's config is
    read; where memory cannot be estimated, the choice is the one that needs least."""
    decides_offload, decides_checkpointing = _shares_device(cfg), cfg.trainer.gradient_checkpointing == "auto"
    if cfg.trainer.placement.resolve_device() != "cuda" or not (decides_offload or decides_checkpointing):
        return _get_default_decision(cfg)
    if cfg.trainer.distillation.is_on:
        return _get_default_decision(cfg, "the memory of teachers is not estimated")
    try:
        return decide_memory(cfg, load_shapes(cfg, offline=False), find_gpu())
    except Exception as error:  # a model whose shape cannot be read, or a driver without a GPU, may well train
        logger.warning("memory is not estimated: {!r}", error)
        return _get_default_decision(cfg, "memory is not estimated")


def _get_default_decision(cfg: SkyRLConfig, reason: str = "") -> MemoryDecision:
    settings: dict[str, Any] = {}
    if cfg.trainer.placement.offload == "auto":
        settings[OFFLOAD] = "all"
    if cfg.trainer.gradient_checkpointing == "auto":
        settings[CHECKPOINTING] = True
    return MemoryDecision(settings, dict.fromkeys(settings, reason) if reason else {})


def decide_memory(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device) -> MemoryDecision:
    """Choose what moves to host memory first, then whether activations are stored in the memory that is left.

    Args:
        cfg: validated settings.
        shapes: of each model of the run.
    """
    if device.kind != "cuda":
        return _get_default_decision(cfg)
    decision = _get_default_decision(cfg) | (
        _decide_offload(cfg, shapes, device) if _shares_device(cfg) else MemoryDecision()
    )
    if cfg.trainer.gradient_checkpointing == "auto":
        decision |= _decide_checkpointing(decision.apply(cfg), shapes, device)
    return decision


def _decide_offload(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device) -> MemoryDecision:
    """Choose the mode that moves least among those that fit, or the one that is set.

    A mode fits if on each GPU, with a margin, every phase fits next to what others leave there (or needs as much with
    `all`), and the engine's cache still holds half of the completions that it would hold at once with `all`, or that a
    step has: completions of full length are rare.
    """
    asked = cfg.trainer.placement.offload
    misfits: list[str] = []
    for mode in ("keep", "optimizer") if asked == "auto" else (asked,):
        limit = _limit_engine(cfg, shapes, device, mode)
        settings = {OFFLOAD: mode} | ({} if limit is None else {_ENGINE_FRACTION: limit})
        plan = estimate_memory(apply_overrides(cfg, settings), shapes, device)
        rest = _describe_rest(cfg, plan, limit)
        if asked != "auto":
            return MemoryDecision(settings, {OFFLOAD: f"as set{rest}"})
        misfit = _find_misfit(cfg, plan, estimate_memory(apply_overrides(cfg, {OFFLOAD: "all"}), shapes, device))
        if misfit is None:
            reason = "; ".join([f"fits in {device.usable / 1e9:.0f} GB{rest}", *misfits])
            return MemoryDecision(settings, {OFFLOAD: reason})
        misfits.append(f"{mode} does not fit: {misfit}")
    return MemoryDecision({OFFLOAD: "all"}, {OFFLOAD: "; ".join(misfits)})


def _decide_checkpointing(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device) -> MemoryDecision:
    """Choose to store activations if training fits with them, with a margin.

    Args:
        cfg: with the decision about offload.
    """
    plan = estimate_memory(apply_overrides(cfg, {CHECKPOINTING: False}), shapes, device)
    if not all(plan.workers.values()):
        return MemoryDecision({CHECKPOINTING: True}, {CHECKPOINTING: plan.notes[0]})
    largest = max((phase for phase in plan.phases if phase.name.startswith("train ")), key=_add_margin)
    needed = f"{largest.name} needs {_add_margin(largest) / 1e9:.1f} of {device.usable / 1e9:.0f} GB with a margin"
    fits = _add_margin(largest) <= device.usable
    return MemoryDecision({CHECKPOINTING: not fits}, {CHECKPOINTING: needed if fits else f"without it, {needed}"})


def _add_margin(phase: Phase) -> float:
    """Return the bytes of a phase with a margin on all but libraries."""
    libraries = phase.parts.get("libraries", 0.0)
    return libraries + MARGIN * (phase.total - libraries)


def _shares_device(cfg: SkyRLConfig) -> bool:
    placement = cfg.trainer.placement
    return placement.colocate_all or (placement.colocate_policy_ref and cfg.trainer.algorithm.uses_reference_model)


def _limit_engine(
    cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device, mode: OffloadMode
) -> float | None:
    """Return the fraction of the device that models at rest leave to an engine, if it is less than set; None otherwise,
    and with `all`, which leaves the settings as they are."""
    generator = cfg.generator
    reserves = EngineRegistry.get_requirements(generator.backend).reserves_memory
    if mode == "all" or not (cfg.trainer.placement.colocate_all and generator.run_engines_locally and reserves):
        return None
    generate = estimate_memory(apply_overrides(cfg, {OFFLOAD: mode}), shapes, device).phases[0]
    # Of the libraries of all processes, those of the engine's are within its fraction.
    others = MARGIN * generate.parts.get("asleep", 0.0) + generate.parts["libraries"] - device.libraries
    left = max(0.0, math.floor(100 * (device.usable - others) / device.memory) / 100)
    return left if left < generator.gpu_memory_utilization else None


def _find_misfit(cfg: SkyRLConfig, plan: MemoryPlan, baseline: MemoryPlan) -> str | None:
    """Return why a mode does not fit; None if it does.

    Args:
        baseline: plan of `all`.
    """
    usable, least = plan.device.usable, {phase.name: phase.total for phase in baseline.phases}
    if not all(plan.workers.values()):
        return plan.notes[0]
    reserves = EngineRegistry.get_requirements(cfg.generator.backend).reserves_memory
    for phase in plan.phases:
        needed, asleep = _add_margin(phase), phase.parts.get("asleep", 0.0)
        if phase.name == "generate" and reserves:  # takes its fraction of the device, however much it needs
            needed = phase.total + (MARGIN - 1) * asleep
        # A phase that needs as much with `all` is not changed by the decision.
        if needed > usable and phase.total > least.get(phase.name, 0.0):
            return f"{phase.name} needs {needed / 1e9:.1f} GB with a margin"
    if plan.engine is not None and baseline.engine is not None:
        wanted = min(baseline.engine.answers, plan.engine.wanted)
        if plan.engine.shortage or 2 * plan.engine.answers < wanted:
            return f"the engine would hold {plan.engine.answers} completions of full length at once, of {wanted}"
    return None


def _describe_rest(cfg: SkyRLConfig, plan: MemoryPlan, limit: float | None) -> str:
    """Describe what stays on the device, and what the engine gets."""
    asleep = plan.phases[0].parts.get("asleep", 0.0) if plan.phases else 0.0
    text = f", {asleep / 1e9:.1f} GB of models stay" if asleep else ""
    if limit is not None:
        text += f", generator.gpu_memory_utilization is {limit:g} instead of {cfg.generator.gpu_memory_utilization:g}"
    return text
