"""Interfaces of the two sides of a transport."""

from typing import Protocol

import torch

from skyrl_train.weight_sync.base import BytesLocation, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Payload


class Writer(Protocol):
    """Trainer side of a transport. By default, engines read independently and nothing is left to do after a sync."""

    def write(self, payload: Payload, version: int, index: int) -> BytesLocation:
        """Write a bucket to a location that the engines can read, while they may still read the previous one. Returns
        the location as fields of a request."""
        ...

    def transmit(self, request: WeightUpdateRequest) -> None:
        """Send a bucket announced to the engines; the next bucket may be written meanwhile."""

    def finish(self, version: int) -> None:
        """Record that all engines have `version`."""

    def abort(self) -> None:
        """Abort all waits for an engine that failed, in this and other processes. Another sync may follow."""

    def close(self) -> None:
        """Release memory and connections."""


class Reader(Protocol):
    """Engine side of a transport."""

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """Read the bucket's bytes [num_bytes] uint8."""
        ...

    def close(self) -> None:
        """Release memory and connections."""
