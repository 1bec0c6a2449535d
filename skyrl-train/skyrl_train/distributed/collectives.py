"""Records of collectives: the current one of this rank, and the number started.

Libraries call the functions of `torch.distributed` by name, so those are replaced by recording wrappers. On CUDA a
collective is only enqueued: its number still reveals which rank is behind.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from skyrl_gym.waits import PEERS, waiting

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_FSDP_FILE = "_fsdp_param_group.py"
_MOST_FRAMES = 8
"""Callers searched for the layer that FSDP2 gathers: four in torch 2.13."""

_numbers = itertools.count(1)


def record_collectives() -> None:
    """Record all later collectives of this process."""
    for name in _COLLECTIVES:
        function = getattr(dist, name, None)
        if function is not None and not hasattr(function, "__wrapped_collective__"):
            setattr(dist, name, _wrap_collective(name, function))


def _wrap_collective(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run_collective(*args: Any, **kwargs: Any) -> Any:
        with waiting(f"{name} #{next(_numbers)}{_describe_layer()}", on=PEERS):
            return function(*args, **kwargs)

    run_collective.__dict__["__wrapped_collective__"] = function
    return run_collective


def _describe_layer() -> str:
    """Return a description of the layer for which FSDP2 calls; empty for other callers."""
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_filename.endswith(_FSDP_FILE):
            name = getattr(frame.f_locals.get("self"), "_module_fqn", None)
            return f" of {name}" if isinstance(name, str) and name else ""
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
