"""Common order of gathering and sending for all policy ranks. Independent of models and engines.

    every rank, bucket by bucket:   gather  ->  prepare  ->  exchange places  ->  (rank 0) announce
                                                   |
                      rank 0 waits here until the engines have read the previous bucket

Gather and exchange are collectives. Every rank calls them alternately from one thread, so that no rank waits in a
gather while another waits in an exchange. Rank 0 waits for engines only between gather and exchange: with a slow or
crashed engine the other ranks wait in the exchange, which also transfers errors. All ranks then stop at the same
bucket.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.distributed as dist

from skyrl_gym.deadline import outcome_of
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import Place
from skyrl_train.weight_sync.payload import Payload


class PolicyRanks:
    """Communication between the ranks of the policy in the default process group.

    Args:
        rank: rank of this worker in the driver's numbering. (Megatron's process group uses another numbering.)
    """

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, own: object) -> list[Any]:
        """Return the value of each rank, in rank order. A collective."""
        if self.world_size == 1:
            return [own]
        of_ranks: list[Any] = [None] * self.world_size
        dist.all_gather_object(of_ranks, (self.rank, own))
        by_rank = dict(of_ranks)
        return [by_rank[rank] for rank in range(self.world_size)]


def in_lockstep(
    ranks: PolicyRanks,
    payloads: Iterable[Payload],
    prepare: Callable[[Payload, int], Place],
    announce: Callable[[Payload, int, list[Place]], None] = lambda payload, index, places: None,
) -> None:
    """Process every bucket in the same order on all ranks. A collective.

    Args:
        payloads: buckets; gathering them is a collective.
        prepare: writes a bucket to a location that engines can read. Returns the location.
        announce: sends the locations of a bucket, one per rank, to the engines.

    Raises:
        WeightSyncError: another rank failed; names it.
        Exception: the error of `prepare` or `announce` on this rank, after all ranks are notified.
    """
    failure: Exception | None = None
    index = 0
    for payload in payloads:  # not enumerate(), which would keep a reference to the bucket while the next is gathered
        # An error of `announce` is raised here: the other ranks have reached the gather of this bucket.
        own = failure or outcome_of(prepare, payload, index)
        places = _gather_places(ranks, own)
        announced = outcome_of(announce, payload, index, places)
        failure = announced if isinstance(announced, Exception) else None
        index += 1  # noqa: SIM113
        del payload
    if failure is not None:
        raise failure


def _gather_places(ranks: PolicyRanks, own: Place | Exception) -> list[Place]:
    failed = isinstance(own, Exception)
    # Errors are sent as text: an unpicklable error would leave the other ranks waiting.
    answers = ranks.all_gather((failed, str(own) or type(own).__name__ if failed else own))
    if isinstance(own, Exception):
        raise own
    for rank, (has_failed, answer) in enumerate(answers):
        if has_failed:
            raise WeightSyncError(f"policy rank {rank} failed: {answer}")
    return [cast(Place, place) for _, place in answers]
