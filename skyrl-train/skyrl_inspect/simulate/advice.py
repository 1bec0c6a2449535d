"""Hook that advises on the throughput of asynchronous training."""

from collections import deque
from collections.abc import Mapping
from statistics import fmean

from loguru import logger

from skyrl_inspect.simulate.simulator import Costs, SampleCost, Simulation
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.hooks import TrainerHook
from skyrl_train.rollouts.groups import FinishedGroup
from skyrl_train.rollouts.schedule import ScheduleLimits

INTERVAL = 10
"""Steps between two pieces of advice."""

_SIMULATED_STEPS = 30
_IDLE = 0.25
"""Share of the time from which a side counts as idle."""

_SAMPLE_SIZE = "policy/rollout_train_ess"
_MIN_SAMPLE_SIZE = 0.9
"""Effective sample size below which runs with a correction learned less (docs/asynchronous.md)."""

_MAX_STALE = 0.05
"""Share of generated tokens that are masked as too old, mostly of long responses, that causes a warning."""


class Adviser:
    """Throughput statistics of recent steps of a schedule, and advice on settings that would make them faster."""

    def __init__(self, limits: ScheduleLimits):
        self._limits = limits
        self._groups: deque[float] = deque(maxlen=INTERVAL * limits.groups_per_step)
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=INTERVAL)
        self._metrics: deque[Mapping[str, float | None]] = deque(maxlen=INTERVAL)

    def record(
        self,
        groups: list[FinishedGroup],
        step_seconds: float,
        sync_seconds: float,
        waited_seconds: float,
        metrics: Mapping[str, float | None],
    ) -> None:
        """Record a training step.

        Args:
            groups: that it trained.
            step_seconds: of the step without waiting for groups and without the weight sync.
            waited_seconds: for groups.
            metrics: of the step (`compute_pool_metrics`, `compute_group_metrics`, mismatch with the engines).
        """
        self._groups.extend(group.seconds for group in groups)
        self._steps.append((step_seconds, sync_seconds, waited_seconds))
        self._metrics.append(dict(metrics))

    def predict(self) -> dict[str, float]:
        """Return the utilisation in a simulation of the measured durations, under `async/`. Groups take as long as they
        took, however many run: what differs from the measurement is the engines' share in it."""
        costs = Costs(
            num_engines=1,
            seconds_per_iteration=1e-9,
            max_sequences=self._limits.max_running,
            step_seconds=fmean(step for step, _, _ in self._steps),
            sync_seconds=fmean(sync for _, sync, _ in self._steps),
        )
        groups = [[SampleCost(0, seconds)] for seconds in self._groups]
        run = Simulation(self._limits, groups, costs).simulate(min(_SIMULATED_STEPS, self._limits.total_steps))
        return {"async/predicted_trainer_utilisation": run.trainer_utilisation}

    def advise(self, predicted: Mapping[str, float]) -> str:
        """Return one line for the log, about the last steps: a single one may show the opposite of the rest.

        Args:
            predicted: result of `predict`.
        """
        return "; before that: ".join([self._format_throughput_advice(predicted), *self._list_warnings()])

    def _mean(self, name: str) -> float | None:
        """Return the mean of a metric over the steps that have it, weighted by their seconds; None if none has."""
        values = [(metrics.get(name), sum(step)) for metrics, step in zip(self._metrics, self._steps, strict=True)]
        known = [(value, weight) for value, weight in values if value is not None]
        total = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / total if total else None

    def _list_warnings(self) -> list[str]:
        warnings = []
        stale = self._mean("async/stale_token_share") or 0.0
        if stale > _MAX_STALE:
            warnings.append(
                f"{stale:.0%} of the generated tokens are too old and not trained (trainer.fully_async.on_stale=mask), "
                "mostly of long responses: set on_stale=regenerate or order=exact, or raise max_staleness_steps"
            )
        sample_size = self._mean(_SAMPLE_SIZE)
        if self._limits.max_staleness_steps and sample_size is not None and sample_size < _MIN_SAMPLE_SIZE:
            warnings.append(
                f"{_SAMPLE_SIZE}={sample_size:.2f} shows that the policy has diverged from the behavior policy, which "
                "can reduce reward: lower trainer.fully_async.max_staleness_steps, the learning rate or the updates "
                "of a step"
            )
        return warnings

    def _format_throughput_advice(self, predicted: Mapping[str, float]) -> str:
        trainer, slots = (self._mean(f"async/{name}_utilisation") or 0.0 for name in ("trainer", "slot"))
        text = (
            f"trainer busy {trainer:.0%} of the last {len(self._steps)} steps (predicted "
            f"{predicted['async/predicted_trainer_utilisation']:.0%}), {slots:.0%} of the slots in use: "
        )
        largest = self._limits.groups_per_step * (self._limits.max_staleness_steps + 1)
        if trainer >= 1 - _IDLE and slots >= 1 - _IDLE:
            return text + "both sides are busy"
        if trainer >= 1 - _IDLE:
            return text + (
                "training is the bottleneck and engines are idle: move some of their GPUs to training, or lower "
                "trainer.fully_async.max_staleness_steps to train on newer tokens at the same speed"
            )
        if slots < 1 - _IDLE:
            return text + "groups wait for slots: raise trainer.fully_async.max_staleness_steps"
        if self._limits.max_running < largest:
            return text + f"raise trainer.fully_async.num_parallel_generation_workers (at most {largest})"
        return text + "generation is the bottleneck: add engines, or raise trainer.fully_async.max_staleness_steps"


class AsyncAdvice(TrainerHook):
    """Hook that logs advice every `INTERVAL` steps of asynchronous training."""

    _adviser: Adviser | None = None

    def on_log(self) -> None:
        """Record the step, and every `INTERVAL` steps log advice and add the simulated utilisation to the metrics."""
        run = self.run
        if not isinstance(run, FullyAsyncRayPPOTrainer) or run.pool is None or "step" not in run.all_timings:
            return
        timings = run.all_timings
        waited, synced = timings["wait_for_generation_buffer"], timings["sync_weights"]
        self._adviser = self._adviser or Adviser(run.pool.scheduler.limits)
        self._adviser.record(run.step_groups, timings["step"] - waited - synced, synced, waited, run.all_metrics)
        if run.global_step % INTERVAL == 0:
            predicted = self._adviser.predict()
            run.all_metrics |= predicted
            logger.info(self._adviser.advise(predicted))
