"""Hook that reports a run's memory: estimates at its start, measured peaks, and advice when memory is exhausted."""

from loguru import logger

from skyrl_inspect.plan.changes import Overrides, find_smallest_change, format_overrides
from skyrl_inspect.plan.report import PeakComparison, compare_peaks, format_memory
from skyrl_train.config.config import apply_overrides
from skyrl_train.config.validation import validate_cfg
from skyrl_train.errors import WorkerMemoryError
from skyrl_train.hooks import TrainerHook
from skyrl_train.memory_plan.backends import Role
from skyrl_train.memory_plan.decisions import MemoryDecision, decide_memory
from skyrl_train.memory_plan.devices import find_gpu, get_processor
from skyrl_train.memory_plan.memory import MemoryPlan, estimate_memory
from skyrl_train.memory_plan.model_shape import ModelShape
from skyrl_train.memory_plan.shapes import load_shapes
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train.workers.worker import Worker


class MemoryReport(TrainerHook):
    """Memory of a run of reinforcement learning: estimated from its settings, and measured in its first step."""

    run: RayPPOTrainer

    def __init__(self, run: RayPPOTrainer):
        super().__init__(run)
        self._cfg = run.cfg
        self._shapes: dict[Role, ModelShape] = {}
        self.plan: MemoryPlan | None = None
        """None: not estimated yet, or the shape of a model is not known."""
        self.decision = MemoryDecision()
        self.measured: dict[str, dict[str, int]] = {}
        """Model -> phase -> bytes, of the rank that needed most."""

    def on_start(self) -> None:
        """Log the estimates."""
        if isinstance(self.run, RayPPOTrainer) and (text := self.estimate()):
            logger.info("{}", text)

    async def on_step_end(self) -> None:
        """Measure in the first step of a process."""
        if isinstance(self.run, RayPPOTrainer) and not self.is_measured:
            self.run.all_metrics |= await self.measure()

    def on_error(self, error: Exception) -> None:
        """Add estimates, measured peaks and the smallest sufficient change to an error of exhausted memory."""
        if isinstance(self.run, RayPPOTrainer) and isinstance(error, WorkerMemoryError):
            error.add_note(self.format_advice())

    def estimate(self) -> str:
        """Return the estimates as text; empty if they are unknown."""
        try:
            self._shapes = load_shapes(self._cfg, offline=False)
            is_gpu = self._cfg.trainer.placement.device == "cuda"
            device = find_gpu() if is_gpu else get_processor()
            self.decision = decide_memory(self._cfg, self._shapes, device)
            self.plan = estimate_memory(self.decision.apply(self._cfg), self._shapes, device)
        except Exception as error:  # the plan only informs: a model whose shape it cannot read may well train
            logger.warning("no memory estimate: {!r}", error)
            return ""
        return "\n".join(format_memory(self.plan))

    @property
    def is_measured(self) -> bool:
        return bool(self.measured)

    async def measure(self) -> dict[str, float]:
        """Collect the peaks of the steps so far and log them next to the estimates. Returns: metrics in GB."""
        for group in self.run.groups:
            ranks = await group.call_all(Worker.take_memory_peaks)
            phases = {phase for peaks in ranks for phase in peaks}
            self.measured[group.name] = {phase: max(peaks.get(phase, 0) for peaks in ranks) for phase in phases}
        peaks = self._compare_with_estimates()
        if peaks:
            lines = "\n".join(map(str, peaks))
            logger.info("peak memory of a rank above what it held before its model, GB:\n{}", lines)
        metrics = {
            f"memory/{name}_{phase}_peak_gb": size / 1e9
            for name, phases in self.measured.items()
            for phase, size in phases.items()
        }
        if self.plan is not None and self.plan.device.kind == "cuda":
            for peak in peaks:
                metrics[f"memory/{peak.role}_{peak.kind}_estimate_gb"] = peak.estimated / 1e9
                if peak.is_underestimated:
                    logger.warning(
                        "{} needs {:.0%} of the estimated memory; if memory runs out: {}",
                        peak.phase,
                        peak.measured / max(1.0, peak.estimated),
                        " ".join(self.decision.list_savings()) or "python -m skyrl_train.plan finds a change",
                    )
        return metrics

    def _compare_with_estimates(self) -> list[PeakComparison]:
        # Inline, all models share the process: its peaks are not those of one model.
        if self.plan is None or self._cfg.trainer.placement.launcher == "inline":
            return []
        return compare_peaks(self.plan, self.measured)

    def format_advice(self) -> str:
        """Return what was estimated and measured, and settings with which the run needs less."""
        if self.plan is None:
            self.estimate()
        if self.plan is None:
            return "lower trainer.micro_train_batch_size_per_gpu or trainer.logprobs_chunk_size"
        lines = [*format_memory(self.plan), *map(str, self._compare_with_estimates())]
        lines += ["nothing was measured before"] if not self.is_measured else []
        if savings := self.decision.list_savings():
            lines.append(f"{self.decision}\nmore memory is free with {' '.join(savings)}")
        change = self._find_change(self.plan)
        if change is not None:
            lines.append(f"the smallest change that is estimated to help:\n  {format_overrides(change)}")
        return "\n".join(lines)

    def _find_change(self, plan: MemoryPlan) -> Overrides | None:
        """Return settings with which the run fits. If the estimates say that it does, there is less memory than they
        assume: settings with which the largest phase of a worker needs a quarter less."""
        most = 0.75 * _get_largest_phase(plan)

        def missing(changed: MemoryPlan) -> float:
            return changed.excess if plan.shortages else changed.excess + max(0.0, _get_largest_phase(changed) - most)

        def check(overrides: Overrides) -> None:
            validate_cfg(apply_overrides(self._cfg, overrides))

        return find_smallest_change(self._cfg, self._shapes, plan.device, check, missing)


def _get_largest_phase(plan: MemoryPlan) -> float:
    return max((phase.total for phases in plan.workers.values() for phase in phases), default=0.0)
