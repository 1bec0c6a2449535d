"""FSDP2 (`fully_shard`): sharding a model over ranks, and the operations that must know it is sharded."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from skyrl_train.config import FSDPConfig


def shard_model(model: nn.Module, mesh: DeviceMesh, config: FSDPConfig, *, bf16: bool) -> nn.Module:
    """Shards each transformer block and then the rest, in place. Parameters stay float32 masters; with `bf16` they are
    cast for forward and backward, and gradients are reduced in float32.

    Args:
        model: float32 parameters, on the CPU or the mesh's device, the same on every rank.
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
    """The layers that transformers says must not be split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor (a collective: every rank must call it)."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter whole, one at a time, in the same order on every rank. Tied parameters appear once."""
    for name, parameter in model.named_parameters():
        yield name, full(parameter.detach())


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scales the gradients to at most `max_norm` over all ranks; returns the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, foreach=True)
    return float(full(norm))
