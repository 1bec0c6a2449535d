"""Sharding of a model over ranks by FSDP2 (`fully_shard`), and the operations that depend on it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.config import FSDPConfig
from skyrl_train.distributed.broadcast import broadcast_buffers
from skyrl_train.distributed.sharded_tensor import copy_into, gather_full_tensor, get_row_range
from skyrl_train.errors import ConfigError
from skyrl_train.models.build import get_transformer
from skyrl_train.models.cpu_linear import disable_onednn_linear
from skyrl_train.models.experts import Routers
from skyrl_train.models.linear_attention import has_delta_nets
from skyrl_train.models.scoring import ScoringModel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.models.weight_files import (
    WeightFiles,
    find_float32_modules,
    get_name_in_files,
    get_transformer_blocks,
    plan_dtypes,
)


def cast_frozen_parameters(model: ScoringModel | ValueModel, *, is_trained: bool) -> None:
    """Cast parameters that no optimizer changes to bfloat16, in place, except for those that transformers then keeps in
    float32: half the memory of a reference model, or of a base model under adapters. Mixed precision computes with
    these values anyway.

    Args:
        model: before sharding; also on the meta device.
        is_trained: False for a model that is only evaluated: all its parameters count as frozen.
    """
    planned = plan_dtypes(get_transformer(model), torch.bfloat16)
    for name, parameter in get_transformer(model).named_parameters():
        if not (is_trained and parameter.requires_grad):
            parameter.data = parameter.data.to(planned(get_name_in_files(name)) or torch.bfloat16)


def compile_layers(transformer: PreTrainedModel) -> None:
    """Compile the forward of each layer of a transformers model, in place. Hooks of a layer (FSDP's, recomputation)
    stay outside.

    Raises:
        ConfigError: shapes inside the layers depend on values.
    """
    kind = "a mixture of experts" if Routers(transformer) else has_delta_nets(transformer.config) and "linear attention"
    if kind:
        raise ConfigError(
            f"trainer.compile_layers=true does not support {kind} ({transformer.config.model_type}): set it to false"
        )
    disable_onednn_linear(transformer)
    for block in get_transformer_blocks(transformer):
        block.forward = torch.compile(block.forward, dynamic=True)  # numbers of tokens differ between micro-batches


def shard_model(
    model: ScoringModel | ValueModel, mesh: DeviceMesh, config: FSDPConfig, *, bf16: bool
) -> ScoringModel | ValueModel:
    """Shard each transformer block and then the rest, in place. Trained parameters stay float32 masters; with `bf16`
    they are cast for forward and backward, except for those that transformers then keeps in float32, and gradients are
    reduced in float32.

    Args:
        model: trained parameters in float32, on the CPU or the mesh's device, the same on every rank; or (on some
            ranks) on the meta device, for `load_from_files` or `load_full_state`.

    Raises:
        ConfigError: with `bf16`, a parameter that stays float32 cannot be grouped separately from parameters that are
            cast.
    """
    # Inputs of blocks come from bfloat16 weights already; some models pass rotary angles in float32.
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy()
    shard = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=offload,
        reshard_after_forward=config.reshard_after_forward,
    )
    # Parameters of a group need one precision: these modules are separate groups, created before the surrounding ones.
    in_float32 = find_float32_modules(get_transformer(model), torch.bfloat16) if bf16 else []
    for module, cast_inside in reversed(in_float32):  # inner modules first
        for cast in cast_inside:
            if not isinstance(cast, FSDPModule):
                cast.register_forward_hook(_copy_view)  # before FSDP's hook, which looks for gradients in the output
                shard(cast, mp_policy=precision)
        shard(module, mp_policy=replace(precision, param_dtype=None))
    for block in get_transformer_blocks(model):
        if not isinstance(block, FSDPModule):
            shard(block, mp_policy=precision)
    # Only model outputs are float32: between its layers that would be combined with bfloat16 weights.
    shard(model, mp_policy=replace(precision, output_dtype=torch.float32))
    return model


def reshard(model: nn.Module) -> None:
    """Free unsharded copies of parameters, and restore the shards in the modules."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _copy_view(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Return the output, or a copy if it is a view (such as of a linear layer with bias): FSDP2 loses gradients of a
    view that is changed in place."""
    return output.clone() if isinstance(output, torch.Tensor) and output._base is not None else output


def load_full_state(model: nn.Module, whole: dict[str, Any], config: FSDPConfig, device: torch.device) -> None:
    """Scatter an unsharded model of rank 0 to all ranks, parameter by parameter. A collective.

    Args:
        model: sharded; on ranks other than 0 it may still be on the meta device.
        whole: the model's state dict on rank 0; ignored on other ranks.
        device: device of the computation.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if config.cpu_offload else device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    broadcast_buffers(model, device)


def get_non_file_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return by name all values not on the meta device, for `load_from_files`: buffers, adapters, a critic's head.
    Before sharding."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named if not tensor.is_meta}


@torch.no_grad()
def load_from_files(
    model: nn.Module,
    transformer: nn.Module,
    files: WeightFiles,
    values: Mapping[str, torch.Tensor],
    config: FSDPConfig,
    device: torch.device,
) -> None:
    """Read this rank's shard of each parameter from files. A collective, because values without files are broadcast.

    Args:
        model: sharded; it may still be on the meta device.
        transformer: the inner model that the files belong to.
        values: from `get_non_file_values`; values of rank 0 are used.
        device: device of the computation.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if config.cpu_offload else device)
    names = {id(parameter): name for name, parameter in transformer.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in values:
            whole = values[name].to(device, copy=True)  # on a CPU it may be the shard itself
            dist.broadcast(whole, src=0)
            copy_into(parameter, whole)
        else:
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            shard.copy_(files.read(names[id(parameter)], *get_row_range(parameter)))
    for name in [name for name, _ in model.named_buffers()]:
        module_name, _, buffer_name = name.rpartition(".")
        setattr(model.get_submodule(module_name), buffer_name, values[name])
    broadcast_buffers(model, device)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm`. Returns: the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, foreach=True)
    return float(gather_full_tensor(norm))
