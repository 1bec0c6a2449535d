"""One order for the gathers of all policy ranks and what each of them sends. Knows neither models nor engines.

    every rank, bucket by bucket:   gather  ->  prepare  ->  exchange places  ->  (rank 0) announce
                                                   |
                      rank 0 waits here until the engines have read the bucket before

Gather and exchange are collectives. Every rank takes them in turn from one thread, so none of them waits in a gather
while another waits in an exchange. Engines are waited for between gather and exchange alone: a slow or dead engine
finds the other ranks in the exchange, which also carries errors. All ranks then stop at the same bucket.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch.distributed as dist

from skyrl_gym.deadline import outcome_of
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import Place
from skyrl_train.weight_sync.payload import Payload


class PolicyRanks:
    """The ranks of the policy in the default process group, as one of them sees them.

    Args:
        rank: of this worker, as the driver counts. (Megatron counts otherwise in its process group.)
    """

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.rank = rank
        self.world_size = world_size

    def all_gather(self, own: object) -> list[Any]:
        """Return what each rank gave, in rank order. A collective."""
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
    """Take every bucket, on all ranks alike. A collective.

    Args:
        payloads: buckets, whose gathering is a collective.
        prepare: puts a bucket where engines can read it. Returns: its place.
        announce: tells the engines the places of a bucket, one of each rank.

    Raises:
        WeightSyncError: another rank failed; names it.
        Exception: what `prepare` or `announce` raised on this rank, once all ranks know of it.
    """
    failure: Exception | None = None
    index = 0
    for payload in payloads:  # not enumerate(), which would keep the bucket while the next one is gathered
        # An error of `announce` comes here: the other ranks are in the gather of this bucket by now, or were.
        own = failure or outcome_of(prepare, payload, index)
        places = _exchange(ranks, own)
        announced = outcome_of(announce, payload, index, places)
        failure = announced if isinstance(announced, Exception) else None
        index += 1  # noqa: SIM113
        del payload
    if failure is not None:
        raise failure


def _exchange(ranks: PolicyRanks, own: Place | Exception) -> list[Place]:
    failed = isinstance(own, Exception)
    # Errors travel as text: one that cannot be pickled would leave the other ranks waiting.
    answers = ranks.all_gather((failed, str(own) or type(own).__name__ if failed else own))
    if isinstance(own, Exception):
        raise own
    for rank, (has_failed, answer) in enumerate(answers):
        if has_failed:
            raise WeightSyncError(f"policy rank {rank} failed: {answer}")
    return [cast(Place, place) for _, place in answers]
