"""Memory of a DeepSpeed engine: report by device, and the tensors that models which time-share a GPU offload."""

from collections.abc import Iterator

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import nn

from skyrl_train.training_backends.deepspeed.partitions import (
    Engine,
    get_flat_weights,
    get_local_tensor,
    is_trained,
)
from skyrl_train.training_backends.optimizer import iter_moments

_GRADIENTS = {
    2: (OffloadStateTypeEnum.lp_grads,),
    3: (OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer),
}
"""Kinds of state that the engine moves itself, by stage."""


def build_memory_report(engine: Engine, model: nn.Module, stage: int) -> str:
    """Return a table of the bytes of this rank by kind and device. Gradients and moments count even before they
    exist.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if is_trained(engine) else []
    world_size = 1 if engine is None else engine.world_size
    sizes: dict[tuple[str, str], int] = {}

    def add(kind: str, device: torch.device, num_bytes: int) -> None:
        place = kind, device.type
        sizes[place] = sizes.get(place, 0) + num_bytes

    for parameter in model.parameters():
        held = get_local_tensor(parameter)
        add("parameters", held.device, held.nbytes)
    for flat in {id(flat): flat for flat in (get_flat_weights(engine, parameter) for parameter in trained)}.values():
        if stage > 0:
            add("float32 weights", flat.device, flat.nbytes)
        add("moments", flat.device, 2 * flat.nbytes)
        num_gradients = flat.numel() * (world_size if stage == 1 else 1)
        add("gradients", flat.device, num_gradients * flat.element_size())
    rows = [*((*place, num_bytes) for place, num_bytes in sizes.items()), ("all", "", sum(sizes.values()))]
    return "\n".join(f"  {kind:<16}{device:<6}{num_bytes / 1e6:>12,.1f} MB" for kind, device, num_bytes in rows)


def offload_gradients(engine: Engine) -> None:
    """Move the engine's gradients to host memory, and free its buffers of them."""
    if is_trained(engine) and _get_stage(engine) > 0 and not _is_offloading_parameters(engine):
        kinds = _GRADIENTS[max(_get_stage(engine), 2)]
        engine.offload_states(include=list(kinds), device=OffloadDeviceEnum.cpu, pin_memory=False)


def onload_gradients(engine: Engine) -> None:
    """Move back what `offload_gradients` moved."""
    if is_trained(engine) and _get_stage(engine) > 0 and not _is_offloading_parameters(engine):
        engine.reload_states()


def iter_weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield this rank's part of every parameter, and the buffers."""
    yield from map(get_local_tensor, model.parameters())
    yield from model.buffers()


def iter_optimizer_state(engine: Engine, model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the flat float32 weights, which stage 0 does not have, and the moments."""
    for parameter in model.parameters():
        if parameter.requires_grad and (flat := get_flat_weights(engine, parameter)) is not parameter:
            yield flat
    yield from iter_moments(engine.basic_optimizer)


def _get_stage(engine: Engine) -> int:
    return 0 if engine is None else engine.zero_optimization_stage()


def _is_offloading_parameters(engine: Engine) -> bool:
    """Return whether parameters are kept in host memory anyway."""
    offload = None if engine is None else engine.zero_offload_param()
    return offload is not None and offload.device != OffloadDeviceEnum.none
