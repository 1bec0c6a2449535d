"""Groups between generation and the training step that consumes them."""

from dataclasses import dataclass, replace

from skyrl_train.rollouts.adapter import GeneratorOutput, to_generator_output
from skyrl_train.rollouts.filters import map_samples, set_uid
from skyrl_train.rollouts.schedule import OnStale
from skyrl_train.rollouts.types import NO_VERSION, RolloutBatch, TrainingSample, Trajectory, TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """Finished group that waits for training.

    Examples:
        A group that was started with weights of version 3 and finished with version 4:

        >>> from skyrl_train.rollouts.types import TrajectoryID
        >>> sample = TrainingSample([5], [8, 9, 2], [1, 1, 1], [0.0, 0.0, 1.0], weight_versions=[3, 4, 4])
        >>> group = TrajectoryGroup("question_0", [Trajectory(TrajectoryID("question_0", 0), [sample])])
        >>> finished = FinishedGroup(ticket=12, group=group, metrics={}, version=3, seconds=1.5)
        >>> finished.oldest_version, finished.get_staleness_version("mask")
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
        """Training step during which the group was started."""
        return self.version + 1

    @property
    def rollouts(self) -> RolloutBatch:
        return RolloutBatch([self.group], self.metrics)

    @property
    def generator_output(self) -> GeneratorOutput:
        """The group in `GeneratorOutput` format."""
        return to_generator_output(self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Weight version of the oldest token; the version at the start if no token version is known."""
        return min(get_known_versions(self.group.trajectories), default=self.version)

    def get_staleness_version(self, on_stale: OnStale) -> int:
        """Return the weight version that determines staleness: of the oldest token, or of the newest if older tokens
        are masked."""
        if on_stale == "mask":
            return max(get_known_versions(self.group.trajectories), default=self.version)
        return self.oldest_version


def get_known_versions(trajectories: list[Trajectory]) -> list[int]:
    """Return all known weight versions of generated tokens."""
    return [
        version
        for trajectory in trajectories
        for sample in trajectory.samples
        for version in sample.weight_versions or []
        if version != NO_VERSION
    ]


def mask_stale(group: TrajectoryGroup, oldest: int) -> TrajectoryGroup:
    """Mask tokens with a weight version before `oldest`. Tokens of unknown version are kept."""

    def masked(sample: TrainingSample) -> TrainingSample:
        if sample.weight_versions is None:
            return sample
        pairs = zip(sample.loss_mask, sample.weight_versions, strict=True)
        return replace(
            sample, loss_mask=[mask * (version == NO_VERSION or version >= oldest) for mask, version in pairs]
        )

    return replace(group, trajectories=[map_samples(each, masked) for each in group.trajectories])


def make_group_uids_unique(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return the groups of a step with unique uids: a prompt that occurs twice (from two epochs) forms two groups."""
    seen: set[str] = set()
    result = []
    for group in groups:
        uid, number = group.uid, 1
        while uid in seen:
            number += 1
            uid = f"{group.uid}#{number}"
        seen.add(uid)
        result.append(group if uid == group.uid else set_uid(group, uid))
    return result
