"""Memory of a DeepSpeed engine: report by device, offload to host memory and onload.

Models that time-share a GPU leave it between their phases.
"""

from collections.abc import Iterator

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from torch import nn

from skyrl_train.training_backends.deepspeed.partitions import (
    Engine,
    free_gathered_parameters,
    get_flat_weights,
    get_local_tensor,
    is_trained,
)
from skyrl_train.training_backends.optimizer import move_optimizer_state

_CPU = torch.device("cpu")
_OF_ENGINE = {
    2: (OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads),
    3: (
        OffloadStateTypeEnum.lp_params,
        OffloadStateTypeEnum.lp_grads,
        OffloadStateTypeEnum.contiguous_grad_buffer,
    ),
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


def offload_model(engine: Engine, model: nn.Module, *, with_optimizer: bool) -> None:
    """Move a model, and the state of its optimizer, to host memory."""
    free_gathered_parameters(engine)
    stage = _get_stage(engine)
    has_optimizer = is_trained(engine)
    if has_optimizer and stage > 0 and not _is_offloading_parameters(engine):
        kinds = _OF_ENGINE[max(stage, 2)]
        engine.offload_states(include=list(kinds), device=OffloadDeviceEnum.cpu, pin_memory=False)
    _move_rest(model, _CPU)
    if has_optimizer and with_optimizer and not engine.zero_use_cpu_optimizer():
        for flat in _get_flat_weights(engine, model):
            flat.data = flat.data.to(_CPU)
        move_optimizer_state(engine.basic_optimizer, _CPU)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def onload_model(engine: Engine, model: nn.Module, device: torch.device) -> None:
    """Move back what `offload_model` moved."""
    stage = _get_stage(engine)
    has_optimizer = is_trained(engine)
    if has_optimizer and stage > 0 and not _is_offloading_parameters(engine):
        engine.reload_states()
    if not _is_offloading_parameters(engine):
        _move_rest(model, device)
    if has_optimizer and not engine.zero_use_cpu_optimizer():
        for flat in _get_flat_weights(engine, model):
            flat.data = flat.data.to(device)
        move_optimizer_state(engine.basic_optimizer, device)


def _move_rest(model: nn.Module, device: torch.device) -> None:
    """Move parameters that the engine does not move: all without an optimizer, frozen ones of stages 1 and 2."""
    for parameter in model.parameters():
        held = get_local_tensor(parameter)
        held.data = held.data.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _get_flat_weights(engine: Engine, model: nn.Module) -> Iterator[torch.Tensor]:
    flats = (get_flat_weights(engine, parameter) for parameter in model.parameters() if parameter.requires_grad)
    yield from {id(flat): flat for flat in flats}.values()


def _get_stage(engine: Engine) -> int:
    return 0 if engine is None else engine.zero_optimization_stage()


def _is_offloading_parameters(engine: Engine) -> bool:
    """Return whether parameters are kept in host memory anyway."""
    offload = None if engine is None else engine.zero_offload_param()
    return offload is not None and offload.device != OffloadDeviceEnum.none
