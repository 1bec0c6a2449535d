"""Sharding of a model over ranks by FSDP2 (`fully_shard`), and the operations that depend on it."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from skyrl_train.config import FSDPConfig
from skyrl_train.distributed.sharded_tensor import gather_full_tensor


def shard_model(model: nn.Module, mesh: DeviceMesh, config: FSDPConfig, *, bf16: bool) -> nn.Module:
    """Shard each transformer block and then the rest, in place. Parameters stay float32 masters; with `bf16` they are
    cast for forward and backward, and gradients are reduced in float32.

    Args:
        model: float32 parameters, on the CPU or the mesh's device, the same on every rank; or (on some ranks) on the
            meta device, for `load_whole_state`.
    """
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy()
    shard = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=offload,
        reshard_after_forward=config.reshard_after_forward,
    )
    for block in transformer_blocks(model):
        shard(block, mp_policy=precision)
    # Only what leaves the model is float32: between its layers that would meet weights in bfloat16.
    shard(model, mp_policy=replace(precision, output_dtype=torch.float32))
    return model


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers says must not be split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def load_whole_state(model: nn.Module, whole: dict[str, Any], config: FSDPConfig, device: torch.device) -> None:
    """Scatter a model that rank 0 holds whole to all ranks, parameter by parameter. A collective.

    Args:
        model: sharded; on ranks other than 0 it may still be on the meta device.
        whole: the model's state dict on rank 0; what other ranks give is not looked at.
        device: what the model computes on.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if config.cpu_offload else device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    # A state dict lacks the buffers that are computed from the config (rotary frequencies): these come from rank 0 too.
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            on_device = buffer.to(device)
            dist.broadcast(on_device, src=0)
            setattr(module, name, on_device)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm`. Returns: the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, foreach=True)
    return float(gather_full_tensor(norm))


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state that an optimizer keeps of every parameter. Step counts stay where the optimizer wants them."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(device)
