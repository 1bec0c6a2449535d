"""Segments of CUDA's caching allocator (https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of the allocator."""

_ON, _OFF = "expandable_segments:True", "expandable_segments:False"
_is_expandable = False


def enable_expandable_segments() -> None:
    """Enable expandable segments in the allocator of this process for later allocations."""
    global _is_expandable
    _set(_ON)
    _is_expandable = True


def release_cached_memory(device: torch.device) -> None:
    """Return memory that the allocator caches to the device, for other processes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def disable_expandable_segments() -> Iterator[None]:
    """Allocate in segments that another process can open: CUDA cannot export handles of expandable ones."""
    if not (_is_expandable or any(_ON in os.environ.get(name, "") for name in VARIABLES)):
        yield
        return
    _set(_OFF)  # the allocator then does not reuse free blocks of expandable segments either
    try:
        yield
    finally:
        _set(_ON)


def _set(setting: str) -> None:
    # A new setting replaces all others, so settings of the environment must be repeated.
    others = [part for name in VARIABLES for part in os.environ.get(name, "").split(",") if part]
    kept = [part for part in others if not part.startswith("expandable_segments")]
    torch._C._accelerator_setAllocatorSettings(",".join([*kept, setting]))
