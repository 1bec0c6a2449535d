"""The two ends of a transport."""

from typing import Protocol

import torch

from skyrl_train.weight_sync.base import Place, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Payload


class Writer(Protocol):
    """The trainer's end. By default the engines read on their own, and nothing is left to do after a sync."""

    def write(self, payload: Payload, version: int, index: int) -> Place:
        """Put a bucket where the engines can read it, while they may still read the one before. Returns: its place, as
        fields of a request."""
        ...

    def transmit(self, request: WeightUpdateRequest) -> None:
        """Send a bucket of which the engines were told; the next one may be written meanwhile."""

    def finish(self, version: int) -> None:
        """Record that all engines hold `version`."""

    def abort(self) -> None:
        """End what waits for an engine that failed, here and elsewhere. Another sync may follow."""

    def close(self) -> None:
        """Release memory and connections."""


class Reader(Protocol):
    """An engine's end."""

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """Return the bucket's bytes. [num_bytes] uint8"""
        ...

    def close(self) -> None:
        """Release memory and connections."""
