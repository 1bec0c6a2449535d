"""Segments of CUDA's caching allocator (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of the allocator."""

_ON, _OFF = "expandable_segments:True", "expandable_segments:False"
_is_expandable = False


def use_expandable_segments() -> None:
    """Let the allocator of this process grow its segments from now on."""
    global _is_expandable
    _set(_ON)
    _is_expandable = True


@contextmanager
def shareable_memory() -> Iterator[None]:
    """Allocate in segments that another process can open: CUDA exports no handle of an expandable one."""
    if not (_is_expandable or any(_ON in os.environ.get(name, "") for name in VARIABLES)):
        yield
        return
    _set(_OFF)  # the allocator then hands out no free block of an expandable segment either
    try:
        yield
    finally:
        _set(_ON)


def _set(setting: str) -> None:
    # A new setting replaces all others: those of the environment must be repeated.
    others = [part for name in VARIABLES for part in os.environ.get(name, "").split(",") if part]
    kept = [part for part in others if not part.startswith("expandable_segments")]
    torch._C._accelerator_setAllocatorSettings(",".join([*kept, setting]))
