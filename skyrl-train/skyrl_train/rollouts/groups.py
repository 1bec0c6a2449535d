"""Groups between their generation and the training step that takes them."""

from dataclasses import dataclass, replace

from skyrl_train.rollouts.adapter import GeneratorOutput, to_generator_output
from skyrl_train.rollouts.filters import map_samples, with_uid
from skyrl_train.rollouts.schedule import OnStale
from skyrl_train.rollouts.types import NO_VERSION, RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """A group that waits for training.

    Examples:
        A group that was started with weights of version 3 and finished with version 4:

        >>> from skyrl_train.rollouts.types import TrajectoryID
        >>> sample = TrainingSample([5], [8, 9, 2], [1, 1, 1], [0.0, 0.0, 1.0], weight_versions=[3, 4, 4])
        >>> group = TrajectoryGroup("question_0", [Trajectory(TrajectoryID("question_0", 0), [sample])])
        >>> finished = FinishedGroup(ticket=12, group=group, metrics={}, version=3, seconds=1.5)
        >>> finished.oldest_version, finished.version_for("mask")
        (3, 4)
    """

    ticket: int
    """Position of the group in the order of the data over all epochs."""

    group: TrajectoryGroup

    metrics: dict[str, float]
    """Metrics of its generation."""

    version: int
    """Weight version of the engines when it was started."""

    seconds: float
    """Duration of its generation."""

    @property
    def uid(self) -> str:
        return self.group.uid

    @property
    def global_step_when_scheduled(self) -> int:
        """Training step that ran when it was started."""
        return self.version + 1

    @property
    def rollouts(self) -> RolloutBatch:
        return RolloutBatch([self.group], self.metrics)

    @property
    def generator_output(self) -> GeneratorOutput:
        """The group as columns."""
        return to_generator_output(self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Weight version of its oldest token; where no version is known, that of its start."""
        return min(versions_of(self.group.trajectories), default=self.version)

    def version_for(self, on_stale: OnStale) -> int:
        """Return the version by which it ages: of its oldest token, or of its newest if older ones are masked."""
        if on_stale == "mask":
            return max(versions_of(self.group.trajectories), default=self.version)
        return self.oldest_version


def versions_of(trajectories: list[Trajectory]) -> list[int]:
    """Return the weight versions of all generated tokens whose version is known."""
    return [
        version
        for trajectory in trajectories
        for sample in trajectory.samples
        for version in sample.weight_versions or []
        if version != NO_VERSION
    ]


def mask_stale(group: TrajectoryGroup, oldest: int) -> TrajectoryGroup:
    """Take tokens of a weight version before `oldest` out of the loss. Tokens of unknown version stay."""

    def masked(sample: TrainingSample) -> TrainingSample:
        if sample.weight_versions is None:
            return sample
        pairs = zip(sample.loss_mask, sample.weight_versions, strict=True)
        return replace(
            sample, loss_mask=[mask * (version == NO_VERSION or version >= oldest) for mask, version in pairs]
        )

    return replace(group, trajectories=[map_samples(each, masked) for each in group.trajectories])


def with_different_uids(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return the groups of a step with another uid where a prompt comes twice (of two epochs): they are two groups."""
    seen: set[str] = set()
    result = []
    for group in groups:
        uid, number = group.uid, 1
        while uid in seen:
            number += 1
            uid = f"{group.uid}#{number}"
        seen.add(uid)
        result.append(group if uid == group.uid else with_uid(group, uid))
    return result
