"""Process groups of a layout, created by megatron-core. They are global to a process."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from skyrl_train.training_backends.megatron.layout import ParallelSizes

_groups: tuple[object, ParallelSizes] | None = None
"""The default process group and the layout for which megatron-core's groups were created."""


def setup_groups(layout: ParallelSizes, timeout_minutes: float, seed: int) -> None:
    """Create the process groups of a layout. A collective. Models in one process share them, so they must share a
    layout.

    Raises:
        RuntimeError: this process holds a model with another layout.
    """
    global _groups
    default = dist.distributed_c10d._get_default_group()
    if parallel_state.model_parallel_is_initialized():
        if _groups == (default, layout):
            return
        if _groups is not None and _groups[0] is default:
            raise RuntimeError(
                f"all models of a process must have the same layout: this process has {_groups[1]}, "
                f"another model requests {layout}"
            )
        parallel_state.destroy_model_parallel()  # groups of a destroyed default group
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    _groups = (default, layout)
    # No weight is drawn and dropout is off; layers request the generators nevertheless.
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def get_tensor_group() -> dist.ProcessGroup:
    """Return the group of ranks that shard the dense layers of a stage."""
    return _group(parallel_state.get_tensor_model_parallel_group())


def select_rank_slice(values: torch.Tensor) -> torch.Tensor:
    """Return the values [n, ...] of this rank's tokens between layers, from [N, ...]: tensor-parallel ranks have
    consecutive slices."""
    group = get_tensor_group()
    return values.chunk(group.size())[group.rank()]


def get_expert_group() -> dist.ProcessGroup:
    """Return the group of ranks that shard the experts of a stage, ordered by expert rank and then by expert-tensor
    rank."""
    return _group(parallel_state.get_expert_tensor_and_model_parallel_group())


def get_stage_group() -> dist.ProcessGroup:
    """Return the group of ranks of a replica with one rank per stage."""
    return _group(parallel_state.get_pipeline_model_parallel_group())


def _group(group: Any) -> dist.ProcessGroup:
    """Narrow the type: megatron-core's annotation also allows lists of groups and None."""
    assert isinstance(group, dist.ProcessGroup)
    return group
