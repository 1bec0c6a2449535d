"""Decision about what models that share GPUs move to host memory (`trainer.placement.offload`)."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from loguru import logger

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.config import OffloadMode
from skyrl_train.config.engine_kinds import EngineRegistry
from skyrl_train.memory_plan.backends import Role
from skyrl_train.memory_plan.devices import Device, find_gpu
from skyrl_train.memory_plan.memory import MemoryPlan, estimate_memory
from skyrl_train.memory_plan.model_shape import ModelShape
from skyrl_train.memory_plan.shapes import load_shapes

MARGIN = 1.15
"""Factor on estimated bytes of models: measured peaks may be higher by this much without a warning."""

_SETTING = "trainer.placement.offload"


@dataclass(frozen=True)
class OffloadDecision:
    """What moves to host memory, and what the engines of the device then get."""

    mode: OffloadMode
    reason: str
    """Empty: models share no GPU, and nothing is to be decided."""

    gpu_memory_utilization: float | None = None
    """Fraction of the device for an engine that reserves memory; None: as set."""

    def apply(self, cfg: SkyRLConfig) -> SkyRLConfig:
        """Return the settings with the decision. Sections that do not change are shared."""
        if not self.reason:
            return cfg
        changed = _set_offload(cfg, self.mode)
        if self.gpu_memory_utilization is not None:
            changed.generator = copy.copy(changed.generator)
            changed.generator.gpu_memory_utilization = self.gpu_memory_utilization
        return changed

    def __str__(self) -> str:
        return f"{_SETTING}: {self.mode}; {self.reason}"


def decide_offload_of_run(cfg: SkyRLConfig) -> OffloadDecision:
    """Decide for the models of a run and the GPUs of this machine. Without a GPU, nothing is read or estimated."""
    asked = cfg.trainer.placement.offload
    forced: OffloadMode = "all" if asked == "auto" else asked
    if cfg.trainer.placement.resolve_device() != "cuda" or not _shares_device(cfg):
        return OffloadDecision(forced, "")
    if cfg.trainer.distillation.is_on:
        return OffloadDecision(forced, "the memory of teachers is not estimated")
    try:
        return decide_offload(cfg, load_shapes(cfg, offline=False), find_gpu())
    except Exception as error:  # a model whose shape cannot be read, or a driver without a GPU, may well train
        logger.warning("memory is not estimated: {!r}", error)
        return OffloadDecision(forced, "memory is not estimated")


def decide_offload(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device) -> OffloadDecision:
    """Return the mode that moves least among those that fit, or the one that is set.

    A mode fits if on each GPU, with a margin, every phase fits next to what others leave there (or needs as much with
    `all`), and the engine's cache still holds half of the completions that it would hold at once with `all`, or that a
    step has: completions of full length are rare.

    Args:
        cfg: validated settings.
        shapes: of each model of the run.
    """
    asked = cfg.trainer.placement.offload
    if device.kind != "cuda" or not _shares_device(cfg):
        return OffloadDecision("all" if asked == "auto" else asked, "")
    misfits = []
    for mode in ("keep", "optimizer") if asked == "auto" else (asked,):
        limit = _limit_engine(cfg, shapes, device, mode)
        decision = OffloadDecision(mode, "to be seen", limit)
        plan = estimate_memory(decision.apply(cfg), shapes, device)
        if asked != "auto":
            return replace(decision, reason=f"as set{_describe_rest(cfg, plan, limit)}")
        misfit = _find_misfit(cfg, plan, estimate_memory(_set_offload(cfg, "all"), shapes, device))
        if misfit is None:
            chosen = f"fits in {device.usable / 1e9:.0f} GB{_describe_rest(cfg, plan, limit)}"
            return replace(decision, reason="; ".join([chosen, *misfits]))
        misfits.append(f"{mode} does not fit: {misfit}")
    return OffloadDecision("all", "; ".join(misfits))


def _shares_device(cfg: SkyRLConfig) -> bool:
    placement = cfg.trainer.placement
    return placement.colocate_all or (placement.colocate_policy_ref and cfg.trainer.algorithm.uses_reference_model)


def _set_offload(cfg: SkyRLConfig, mode: OffloadMode) -> SkyRLConfig:
    changed = copy.copy(cfg)
    changed.trainer = copy.copy(cfg.trainer)
    changed.trainer.placement = copy.copy(cfg.trainer.placement)
    changed.trainer.placement.offload = mode
    return changed


def _limit_engine(
    cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], device: Device, mode: OffloadMode
) -> float | None:
    """Return the fraction of the device that models at rest leave to an engine, if it is less than set; None otherwise,
    and with `all`, which leaves the settings as they are."""
    generator = cfg.generator
    reserves = EngineRegistry.get_requirements(generator.backend).reserves_memory
    if mode == "all" or not (cfg.trainer.placement.colocate_all and generator.run_engines_locally and reserves):
        return None
    generate = estimate_memory(_set_offload(cfg, mode), shapes, device).phases[0]
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
        libraries, asleep = phase.parts.get("libraries", 0.0), phase.parts.get("asleep", 0.0)
        needed = libraries + MARGIN * (phase.total - libraries)
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
