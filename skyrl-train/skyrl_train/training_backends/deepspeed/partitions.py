"""Shards of parameters held by ranks: of the parameter itself (stage 3), and in the flat float32 tensors of its
optimizer (stages 1 to 3).

Stage 0 has neither: its optimizer steps on the parameters. All flat tensors of a rank have the same layout as their
moments, so an index is valid for a weight and its moments.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from skyrl_train.distributed.zero_parameter import get_full_shape, is_zero_parameter

MOMENTS = ("exp_avg", "exp_avg_sq")

Engine: TypeAlias = Any
"""DeepSpeed's engine, which has no types."""

ZeroInit: TypeAlias = Any
"""DeepSpeed object that shards parameters over the ranks."""

ZeroParameter: TypeAlias = Any
"""Parameter with DeepSpeed's attributes."""


@dataclass(frozen=True)
class Part:
    """Part of a parameter in a flat tensor of this rank."""

    start: int
    """First element in the flat tensor."""

    offset: int
    """First element in the whole parameter, flattened."""

    size: int

    def get_from_flat(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of a flat tensor, as a view."""
        return flat.view(-1).narrow(0, self.start, self.size)

    def slice_parameter(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole parameter."""
        return whole.reshape(-1).narrow(0, self.offset, self.size)


def get_flat_weights(engine: Engine, parameter: torch.Tensor) -> torch.Tensor:
    """Return the float32 tensor of this rank that the optimizer updates for a trained parameter; it may contain no part
    of it. Stage 0 updates the parameter itself."""
    if is_zero_parameter(parameter):
        optimizer = engine.optimizer
        return optimizer.fp32_partitioned_groups_flat[optimizer.grad_position[optimizer.get_param_id(parameter)][0]]
    if hasattr(parameter, "_hp_mapping"):
        [flat] = engine.basic_optimizer.param_groups[0]["params"]
        return flat
    return parameter


def find_part_in_optimizer(engine: Engine, parameter: torch.Tensor) -> Part | None:
    """Return the location of a trained parameter in the flat tensors of this rank; None if it has no part of it."""
    if is_zero_parameter(parameter):
        optimizer = engine.optimizer
        _, start, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        own = get_zero_part(parameter)
        return Part(start, own.offset, own.size) if own.size else None
    if not hasattr(parameter, "_hp_mapping"):
        return Part(0, 0, parameter.numel())
    mapping, optimizer = parameter._hp_mapping, engine.optimizer  # type: ignore[attr-defined]
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        # `_hp_mapping` has the order of the model, even if `round_robin_gradients` stores parameters in another order.
        index = optimizer.round_robin_bit16_indices[0][parameter.param_idx_in_group]  # type: ignore[attr-defined]
        return _compute_overlap(optimizer.round_robin_bit16_offsets[0][index], parameter.numel(), engine)
    if mapping is None:
        return None
    return Part(mapping.hp_fragment_address.start, mapping.lp_fragment_address.start, mapping.hp_fragment.numel())


def _compute_overlap(first: int, size: int, engine: Engine) -> Part | None:
    """Return the overlap of a parameter of `size` elements, starting at `first` of all sharded elements, with this
    rank's shard.
    """
    own_size = engine.basic_optimizer.param_groups[0]["params"][0].numel()
    own_first = engine.global_rank * own_size
    start, end = max(first, own_first), min(first + size, own_first + own_size)
    return Part(start - own_first, start - first, end - start) if start < end else None


def get_local_tensor(parameter: ZeroParameter) -> torch.Tensor:
    """Return the tensor that holds this rank's shard of a parameter, or all of it."""
    return parameter.ds_tensor if is_zero_parameter(parameter) else parameter


def get_zero_part(parameter: ZeroParameter) -> Part:
    """Return the part of a stage-3 parameter in this rank's `ds_tensor`, without the padding at its end."""
    size = parameter.ds_tensor.numel()
    offset = min(parameter.ds_numel, parameter.ds_zero_partition_rank * size)
    return Part(0, offset, min(size, parameter.ds_numel - offset))


def gather_from_parts(
    flat: torch.Tensor, part: Part | None, parameter: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Gather a parameter from the parts in the ranks' flat tensors, on the device. A collective."""
    whole = torch.zeros(get_full_shape(parameter), dtype=flat.dtype, device=device)
    if part is not None:
        part.slice_parameter(whole).copy_(part.get_from_flat(flat))
    if is_zero_parameter(parameter) or hasattr(parameter, "_hp_mapping"):
        # Parts do not overlap: each element is a sum of itself and zeros, exact in any order.
        dist.all_reduce(whole)
    return whole


def is_trained(engine: Engine) -> bool:
    """Return whether the engine exists and has an optimizer."""
    return getattr(engine, "basic_optimizer", None) is not None


@torch.no_grad()
def write_parameter(engine: Engine, parameter: ZeroParameter, whole: torch.Tensor) -> None:
    """Write a whole parameter, available on every rank, into this rank's shard, without communication.

    Args:
        engine: None for a model without one.
    """
    if is_zero_parameter(parameter):
        part = get_zero_part(parameter)
        part.get_from_flat(parameter.ds_tensor.data).copy_(part.slice_parameter(whole))
    else:
        parameter.data.copy_(whole)
    if is_trained(engine) and parameter.requires_grad:
        flat, part = get_flat_weights(engine, parameter), find_part_in_optimizer(engine, parameter)
        if part is not None and flat is not parameter:
            part.get_from_flat(flat.data).copy_(part.slice_parameter(whole))


def free_gathered_parameters(engine: Engine) -> None:
    """Free parameters that stage 3 holds gathered, so that the next forward gathers them again."""
    if engine is None or engine.zero_optimization_stage() < 3:
        return
    for parameter in engine.module.parameters():
        # A forward without a backward stays registered as user of a parameter. No module is computing now.
        parameter.ds_active_sub_modules.clear()
    engine.empty_partition_cache()
