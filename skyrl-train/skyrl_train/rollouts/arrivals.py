"""Positions of finished groups in the batch of a step while other groups are still generated."""

from collections.abc import Sequence
from typing import Literal

from skyrl_train.rollouts.filters import is_informative
from skyrl_train.rollouts.types import TrajectoryGroup


class Arrivals:
    """Finished groups of a synchronous step.

    Args:
        sampling: `trainer.algorithm.dynamic_sampling.type`, which determines the positions.
    """

    def __init__(self, sampling: Literal["filter", "replace"] | None):
        self._sampling = sampling
        self._requested: list[str] = []
        self._finished: dict[str, TrajectoryGroup] = {}
        self._leaves: set[str] = set()  # prompts that dynamic sampling leaves out

    def request(self, uids: Sequence[str]) -> None:
        """Record the requested prompts: the batch, or further prompts of dynamic sampling."""
        if self._sampling == "replace":  # takes all groups of one request, the last
            self._requested.clear()
        self._requested += uids

    def add(self, group: TrajectoryGroup) -> None:
        """Record a finished group."""
        self._finished[group.uid] = group
        if self._sampling is not None and not is_informative(group):
            self._leaves.add(group.uid)

    def compute_positions(self, num_prompts: int) -> dict[int, TrajectoryGroup]:
        """Return the finished groups whose position in the batch is known: the position of the prompt, adjusted for
        groups that dynamic sampling leaves out.

        Args:
            num_prompts: number of prompts of the batch.
        """
        if self._sampling != "filter":  # `replace` puts copies into the places of those that it leaves out
            known = enumerate(self._requested)
        else:  # moves the others up: known up to the first that is not finished
            missing = (index for index, uid in enumerate(self._requested) if uid not in self._finished)
            first = next(missing, len(self._requested))
            known = enumerate(uid for uid in self._requested[:first] if uid not in self._leaves)
        return {
            place: self._finished[uid]
            for place, uid in known
            if place < num_prompts and uid in self._finished and uid not in self._leaves
        }
