"""Weight sync on policy ranks other than 0."""

from collections.abc import Iterable, Sequence

import torch

from skyrl_train.weight_sync.base import Place, WeightSyncInitInfo
from skyrl_train.weight_sync.lockstep import PolicyRanks, in_lockstep
from skyrl_train.weight_sync.payload import NamedTensor, most_bytes_of, payloads_of
from skyrl_train.weight_sync.sender import SyncResult
from skyrl_train.weight_sync.writer import RankWriter


class RankPart:
    """Weight sync of a policy rank other than 0: gathers every bucket with the other ranks and writes it for the
    engines on this rank's device. Rank 0 has a `WeightSender`, which calls and verifies the engines.

    Args:
        init_infos: connection of every engine (`skyrl_train.weight_sync.plan.init_infos_for`).
        device: device of the parameters.
        max_bucket_bytes: value of rank 0.
    """

    def __init__(
        self,
        init_infos: Sequence[WeightSyncInitInfo],
        device: torch.device,
        ranks: PolicyRanks,
        *,
        max_bucket_bytes: int,
    ):
        self._ranks = ranks
        self._most_bytes = most_bytes_of(init_infos[0], max_bucket_bytes)
        self._writer = RankWriter(init_infos, ranks.rank, device)

    def stage(self, tensors: Iterable[NamedTensor], version: int) -> None:
        """Take part in gathering the tensors that rank 0 stages."""
        in_lockstep(self._ranks, payloads_of(tensors, self._most_bytes), lambda payload, index: Place())

    def send(self, tensors: Iterable[NamedTensor] | None, version: int) -> SyncResult:
        """Send every bucket. Returns no metrics, since rank 0 reports.

        Args:
            tensors: parameters; None if they were staged.

        Raises:
            WeightSyncError: this or another rank failed; names the rank.
        """
        if tensors is not None:
            payloads = payloads_of(tensors, self._most_bytes)
            in_lockstep(self._ranks, payloads, lambda payload, index: self._writer.write(payload, version, index))
        return SyncResult(metrics={}, reports=[], fingerprints={})

    def close(self) -> None:
        self._writer.close()
