"""Isolated random states of torch for several workers in one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class RandomState:
    """State of torch's global generators of one worker: as in a separate process, it starts with torch's default seed,
    and is independent of other workers.

    Args:
        device: `cpu` or `cuda`, where the worker computes.
    """

    def __init__(self, device: str):
        self._on_cuda = device == "cuda"
        self._own = self._build_fresh()

    def _build_fresh(self) -> list[torch.Tensor]:
        devices = ["cpu", "cuda"] if self._on_cuda else ["cpu"]
        return [torch.Generator(device).get_state() for device in devices]

    def _get(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._on_cuda else [])]

    def _set(self, states: list[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._on_cuda:
            torch.cuda.set_rng_state(states[1])

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Run the block with this state of the global generators, and restore their previous state afterwards. The
        generators are process-wide: no other thread may use them meanwhile.
        """
        outside = self._get()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._get()
            self._set(outside)
