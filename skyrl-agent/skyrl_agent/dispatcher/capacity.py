"""Slots of the stages, shared by all batches of a runner that run at the same time. Knows no trajectories."""

import itertools
from collections.abc import Hashable, Sequence

from skyrl_agent.config.task_file import DispatcherSection
from skyrl_agent.dispatcher.durations import Durations
from skyrl_agent.dispatcher.limits import PrioritySemaphore, QueueLimit
from skyrl_agent.dispatcher.plan import PLANS, STAGES, Plan, plan_of
from skyrl_agent.dispatcher.sizing import StageEntry, StageSize
from skyrl_agent.types import Stage

NEXT: dict[Stage, Stage] = {"initialize": "generate", "generate": "evaluate"}


class Capacity:
    """Limits of the stages and of open trajectories, and what earlier trajectories tell of the next ones.

    Args:
        section: of the task file.
        val_mode: its `val_config` applies.
        named_instances: instance ids name the same problem in every batch. Otherwise durations of an instance are those
            of its siblings in the batch.

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

    def new_batch(self) -> int:
        """Return the number of a batch: trajectories of earlier batches go first."""
        return next(self._batches)

    def slots(self, stage: Stage, total: int) -> int:
        """Return the number of trajectories, of `total`, that can be in a stage at a time."""
        return min(it for it in (self.stages[stage].running.limit, self.alive.limit, total) if it is not None)

    def instance(self, batch: int, instance_id: str) -> Hashable:
        """Return the key of an instance's durations."""
        return instance_id if self._named_instances else (batch, instance_id)

    def remaining(self, instance: Hashable, stage: Stage) -> float:
        """Return the expected seconds from the begin of a stage to the end; 0 where they are not predictable, or the
        order does not depend on them."""
        if not (self.longest_first and self.durations.predictive):
            return 0.0
        return self.durations.remaining(instance, stage)

    def started(self, stage: Stage, now: float, waited: bool) -> StageEntry | None:
        """Record that a trajectory enters a stage. Returns: for `ended`."""
        if stage not in self._sizes:
            return None
        downstream = NEXT.get(stage)
        pressed = waited and (downstream is None or self.stages[downstream].admitted.is_free)
        return self._sizes[stage].started(now, pressed)

    def ended(self, stage: Stage, now: float, entry: StageEntry | None, instance: Hashable | None) -> None:
        """Record that a stage ended, and resize it.

        Args:
            instance: None: it failed.
        """
        if entry is not None and self._sizes[stage].ended(now, entry, instance):
            self.stages[stage].resize(self._sizes[stage].limit)

    def record_durations(self, instance: Hashable, seconds: Sequence[float]) -> None:
        """Record the seconds of the stages of a trajectory that ended without failure, and reorder those that wait."""
        self.durations.add(instance, seconds)
        if self.longest_first and self.durations.predictive:
            self.alive.reorder()
            for limit in self.stages.values():
                limit.reorder()
