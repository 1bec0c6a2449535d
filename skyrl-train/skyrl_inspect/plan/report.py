"""Plan of a run as text."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from skyrl_inspect.plan.speed import StepTime
from skyrl_train.config import SkyRLConfig
from skyrl_train.memory_plan.backends import Role, get_division_section
from skyrl_train.memory_plan.decisions import MARGIN
from skyrl_train.memory_plan.memory import EnginePlan, MemoryPlan, Phase
from skyrl_train.memory_plan.model_shape import ModelShape

SLOW_STEP_SECONDS = 3600
"""A plan with longer steps fits in memory, and is hardly what was meant."""
NAMES: Mapping[Role, str] = {"policy": "policy", "critic": "critic", "ref": "reference model"}


def format_shapes(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape]) -> list[str]:
    """Say what models the plan is of."""
    lines = []
    for role, shape in shapes.items():
        trained = "" if role == "ref" else f", {shape.trained / 1e6:,.1f} M trained" if shape.has_adapters else ""
        mixture = f", {shape.active / 1e9:.2f} B for each token" if shape.experts else ""
        path = getattr(cfg.trainer, role).model.path
        lines.append(f"{role}: {path}, {shape.parameters / 1e9:.3f} B parameters{mixture}{trained}")
    return lines


def format_memory(plan: MemoryPlan) -> list[str]:
    """Return the phases as a table, with the parts of each."""
    device = plan.device
    place = "one process" if device.kind == "cpu" else "one device"
    of = (
        f" of {device.usable / 1e9:.1f} for tensors ({device.memory / 1e9:.1f} in all)" if device.kind == "cuda" else ""
    )
    lines = [f"memory of {place} ({device.name}), ESTIMATES in GB (1e9 bytes){of}:"]
    lines += [_format_phase(phase, plan) for phase in plan.phases]
    if plan.machine:
        lines.append(
            f"all processes of the machine: {plan.machine / 1e9:.2f} of {device.memory / 1e9:.1f}"
            + ("   DOES NOT FIT" if plan.machine > device.usable else "")
        )
    if plan.host:
        lines.append(f"host memory of a machine while models are offloaded or asleep: {plan.host / 1e9:.1f}")
    if plan.engine is not None:
        lines.append(_format_answers(plan.engine))
    return [*lines, *plan.notes]


def _format_phase(phase: Phase, plan: MemoryPlan) -> str:
    parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in phase.parts.items() if size)
    late = plan.device.kind == "cuda" and phase.total > plan.device.usable
    mark = f"   DOES NOT FIT{_format_fitting_tokens(phase, plan.device.usable)}" if late else ""
    return f"  {phase.name:<20} {phase.total / 1e9:8.2f} = {parts}  [{phase.moment}]{mark}"


def _format_fitting_tokens(phase: Phase, usable: float) -> str:
    """Return with how many tokens a phase would fit, if activations exceed the memory."""
    activations = phase.parts.get("activations", 0.0)
    left = usable - (phase.total - activations)
    if not phase.tokens or left <= 0 or not activations:
        return ""
    return f" with micro-batches of {phase.tokens:,} tokens; up to {int(phase.tokens * left / activations):,} would"


def _format_answers(engine: EnginePlan) -> str:
    if engine.shortage:
        return f"an engine cannot hold one completion: {engine.shortage}"
    rounds = -(-engine.wanted // max(1, engine.answers))
    waits = "all at once" if rounds == 1 else f"in {rounds} rounds at that length"
    return (
        f"an engine holds {engine.answers} completions of full length at once ({engine.bytes_a_token / 1e3:.1f} kB of "
        f"keys and values a token and device); a step has {engine.wanted} for it: {waits}"
    )


def format_times(time: StepTime, num_devices: int, price_per_hour: float | None, num_steps: int | None) -> list[str]:
    """Return the time of a step, of the run where its length is known, and their cost."""
    parts = " + ".join(f"{name} {seconds:,.0f}" for name, seconds in time.seconds.items())
    how = "the longer of generation and the rest" if time.concurrent else "sum"
    prompt, answer = time.tokens
    lines = [
        f"time of a step: {time.total:,.0f} s ({how} of {parts}), at {prompt} + {answer} tokens a sample; {time.source}"
    ]
    if time.generation_rate:
        lines.append(
            f"an engine then generates {time.generation_rate:,.0f} tokens/s (published figures: docs/planner.md)"
        )
    if price_per_hour is not None:
        a_step = time.total / 3600 * num_devices * price_per_hour
        lines.append(f"cost of a step: {a_step:,.2f} ({num_devices} devices at {price_per_hour:g} an hour each)")
        if num_steps is not None:
            lines.append(f"cost of the run: {a_step * num_steps:,.2f} ({num_steps} steps)")
    if num_steps is not None:
        lines.append(f"time of the run: {time.total * num_steps / 3600:,.1f} h ({num_steps} steps)")
    return lines


def format_slow_step(time: StepTime, engine: EnginePlan | None) -> str:
    """Return a warning for a step of over an hour, with the part that takes longest; empty otherwise."""
    if time.total <= SLOW_STEP_SECONDS:
        return ""
    part = max(time.seconds, key=lambda name: time.seconds[name])
    hint = "use more devices, or fewer samples per step"
    if part == "generate" and engine is not None and engine.answers < engine.wanted:
        hint = (
            f"an engine holds {engine.answers} of the {engine.wanted} completions that it receives: shard the model "
            "over more devices (generator.inference_engine_tensor_parallel_size), add engines, or shorten completions"
        )
    return f", but a step takes {time.total / 3600:.1f} h, most of it in `{part}`: {hint}"


def format_undivided(cfg: SkyRLConfig, shapes: Mapping[Role, ModelShape], plan: MemoryPlan) -> list[str]:
    """Name models whose whole weights are on every rank and take over a quarter of a device."""
    lines = []
    for role, phases in plan.workers.items():
        ranks = getattr(cfg.trainer.placement, f"{role}_world_size")
        weights = max((phase.parts.get("weights", 0.0) for phase in phases), default=0.0)
        is_whole = weights >= 2 * shapes[role].parameters * 0.9
        if plan.device.kind == "cuda" and ranks > 1 and is_whole and weights > plan.device.usable / 4:
            lines.append(
                f"the {NAMES[role]} is not sharded: each of {ranks} ranks holds all {weights / 1e9:.0f} GB of its "
                f"weights; shard it with trainer.{role}.{get_division_section(cfg)}, as the policy"
            )
    return lines


class PeakComparison(NamedTuple):
    """Peak memory of a model's ranks in a phase, next to its estimate, in bytes."""

    role: Role
    phase: str
    """As in the plan."""
    kind: Literal["forward", "train"]
    """As measured, and in the name of the metric."""
    measured: int
    estimated: float

    @property
    def is_underestimated(self) -> bool:
        """Whether the decision about offloading, which allows for this much, may not hold."""
        return self.measured > MARGIN * self.estimated

    def __str__(self) -> str:
        return (
            f"  {self.phase:<20} measured {self.measured / 1e9:8.3f}, estimated {self.estimated / 1e9:8.3f} "
            f"({self.measured / max(1.0, self.estimated):.2f} of it)"
        )


def compare_peaks(plan: MemoryPlan, measured: Mapping[str, Mapping[str, int]]) -> list[PeakComparison]:
    """Compare measured peaks of the ranks (the largest of each model) with the estimates of one rank alone: without
    libraries and other processes, which the allocator does not count.

    Args:
        measured: role -> `forward` and `train` -> bytes above what the process held before its model.
    """
    found = []
    for role, phases in plan.workers.items():
        for phase in phases:
            kind: Literal["forward", "train"] = "train" if phase.name.startswith("train") else "forward"
            peak = measured.get(role, {}).get(kind)
            if peak is not None:
                estimated = phase.total + (phase.host if plan.device.kind == "cpu" else 0.0)
                found.append(PeakComparison(role, phase.name, kind, peak, estimated))
    return found
