"""Slots of the stages, shared by all batches of a runner that run at the same time. Independent of trajectories."""

import itertools
from collections.abc import Hashable, Sequence
from statistics import fmean

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher.durations import Durations
from skyrl_agent.dispatcher.limits import PrioritySemaphore, QueueLimit
from skyrl_agent.dispatcher.plan import PLANS, STAGES, Plan, plan_of
from skyrl_agent.dispatcher.sizing import StageEntry, StageSize
from skyrl_agent.types import Stage

NEXT: dict[Stage, Stage] = {"initialize": "generate", "generate": "evaluate"}
HEDGE, MARGIN = 4, 2
"""Factor by which `generate` may exceed its size where one of the last trajectories may be the longest of all, and the
one by which the estimate of what is left may be too high."""


class Capacity:
    """Limits of stages and open trajectories, sized from the durations of earlier trajectories.

    Args:
        section: the task file's `dispatcher` section.
        val_mode: apply the section's `val_config`.
        named_instances: instance ids name the same problem in every batch. Otherwise durations are known from siblings
            in the same batch only.

    Raises:
        ConfigError: contradictory limits.
    """

    def __init__(self, section: DispatcherSection, val_mode: bool = False, named_instances: bool = False) -> None:
        self.plan = plan_of(section, val_mode) if section.type in PLANS else Plan()
        self.stages = {
            stage: QueueLimit(limits.parallel, limits.queue) for stage in STAGES for limits in [self.plan.limits(stage)]
        }
        self.alive = PrioritySemaphore(self.plan.alive)
        self.durations = Durations()
        self.longest_first = section.order == "longest_first" or (section.order is None and self.plan.is_sized)
        self._sizes: dict[Stage, StageSize] = {}
        for stage, fixed in zip(STAGES, (section.initialize, section.generate, section.evaluate), strict=True):
            first = self.plan.limits(stage).parallel
            if self.plan.is_sized and fixed.parallel is None and first is not None:
                self._sizes[stage] = StageSize(first)
        self._named_instances = named_instances
        self._batches = itertools.count()
        self._num_open = 0
        self._hedges = False

    def start_batch(self) -> int:
        """Return the number of a batch: trajectories of earlier batches go first. `end_batch` ends it."""
        self._num_open += 1
        self._set_hedge(False)  # hedging is for a single batch
        return next(self._batches)

    def end_batch(self) -> None:
        """Record that a batch is over."""
        self._num_open -= 1
        self._set_hedge(False)

    @property
    def may_hedge(self) -> bool:
        """True if `update_hedge` may have an effect: only one batch runs, and its `generate` stage is sized."""
        return self._num_open == 1 and not self._hedges and "generate" in self._sizes

    def update_hedge(self, waiting: Sequence[Hashable], working: Sequence[Hashable]) -> None:
        """Raise the limit of `generate` by the factor `HEDGE` if a trajectory not yet started is likely to outlast all
        others: it is unknown which one, and the batch would wait for it.

        Args:
            waiting: instances of the trajectories that have not begun to generate.
            working: instances of those that generate.
        """
        longest = self.durations.longest(waiting)
        left = max(self._estimate_seconds_left(stage, waiting, working) for stage in ("generate", "evaluate"))
        if longest and MARGIN * longest >= left:
            self._set_hedge(True)

    def _estimate_seconds_left(self, stage: Stage, waiting: Sequence[Hashable], working: Sequence[Hashable]) -> float:
        """Estimate the seconds until a stage has done its work, if all of its slots are used until then."""
        limit = self.stages[stage].running.limit
        expected = [[self.durations.stage(instance, stage) for instance in group] for group in (waiting, working)]
        known = [seconds for group in expected for seconds in group if seconds is not None]
        if limit is None or not known:
            return 0.0
        mean = fmean(known)  # for unknown instances
        whole, half = (sum(mean if seconds is None else seconds for seconds in group) for group in expected)
        return (whole + half / 2) / limit

    def _set_hedge(self, hedges: bool) -> None:
        if hedges != self._hedges:
            self._hedges = hedges
            self._update_limit("generate")

    def _update_limit(self, stage: Stage) -> None:
        factor = HEDGE if stage == "generate" and self._hedges else 1
        self.stages[stage].set_limit(factor * self._sizes[stage].limit)

    def slots(self, stage: Stage, total: int) -> int:
        """Return the number of trajectories, of `total`, that can be in a stage at a time."""
        return min(it for it in (self.stages[stage].running.limit, self.alive.limit, total) if it is not None)

    def instance(self, batch: int, instance_id: str) -> Hashable:
        """Return the key of an instance's durations."""
        return instance_id if self._named_instances else (batch, instance_id)

    def estimate_remaining(self, instance: Hashable, stage: Stage) -> float:
        """Return the expected seconds from the start of a stage to the end; 0 if they are not predictable, or the order
        does not depend on them.
        """
        if not (self.longest_first and self.durations.predictive):
            return 0.0
        return self.durations.estimate_remaining(instance, stage)

    def started(self, stage: Stage, now: float, waited: bool) -> StageEntry | None:
        """Record that a trajectory enters a stage. Returns: for `ended`."""
        if stage not in self._sizes:
            return None
        downstream = NEXT.get(stage)
        pressed = waited and (downstream is None or self.stages[downstream].admitted.is_free)
        return self._sizes[stage].started(now, pressed)

    def ended(self, stage: Stage, now: float, entry: StageEntry | None, instance: Hashable | None) -> float | None:
        """Record that a stage ended, and resize it.

        Args:
            instance: None: it failed.

        Returns:
            seconds that the stage would have taken alone; None: it is not sized.
        """
        if entry is None:
            return None
        if self._sizes[stage].ended(now, entry, instance):
            self._update_limit(stage)
        return self._sizes[stage].work(entry)

    def record_durations(self, instance: Hashable, seconds: Sequence[float]) -> None:
        """Record the seconds of the stages (`Durations.add`) of a trajectory that ended without failure, and reorder
        those that wait."""
        self.durations.add(instance, seconds)
        if self.longest_first and self.durations.predictive:
            self.alive.update_order()
            for limit in self.stages.values():
                limit.update_order()
