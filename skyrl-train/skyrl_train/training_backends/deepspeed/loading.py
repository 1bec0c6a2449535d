"""Loading of weights to the ranks of a DeepSpeed engine, whole or (stage 3) sharded: read from files by each rank, or
broadcast from rank 0, one by one.
"""

from collections.abc import Iterator

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from skyrl_train.distributed.broadcast import broadcast_buffers
from skyrl_train.distributed.zero_parameter import get_full_shape, is_zero_parameter
from skyrl_train.models.weight_files import WeightFiles
from skyrl_train.training_backends.deepspeed.engine_settings import JsonSection
from skyrl_train.training_backends.deepspeed.partitions import ZeroInit, ZeroParameter, get_zero_part


def load_on_ranks(
    model: nn.Module,
    transformer: nn.Module,
    files: WeightFiles | None,
    device: torch.device,
    zero_settings: JsonSection | None,
    dtype: torch.dtype,
) -> None:
    """Load parameters and buffers on every rank, in place. A collective.

    Args:
        model: on the CPU or the meta device.
        transformer: the inner model that the files belong to.
        files: files of the parameters on the meta device; all others come from rank 0. None: all come from rank 0.
        zero_settings: DeepSpeed's settings, to shard parameters over the ranks (stage 3); None to copy them.
        dtype: dtype of the stored parameters.
    """
    init: ZeroInit = None
    if zero_settings is not None:
        # Not as a context: the model exists already, and DeepSpeed must not replace tensor constructors.
        init = deepspeed.zero.Init(config_dict_or_path=zero_settings, mem_efficient_linear=False)
    names = {id(parameter): name for name, parameter in transformer.named_parameters()}
    for places in _iter_parameters(model):
        module, name = places[0]
        parameter = module._parameters[name]
        assert parameter is not None
        stored = names[id(parameter)] if files is not None and parameter.is_meta else None
        if parameter.is_meta:
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            parameter = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        else:
            parameter.data = parameter.data.to(device, dtype)
        for module, name in places:  # tied parameters stay tied
            module._parameters[name] = parameter
        if files is not None and stored is not None:
            if init is not None:  # its shard of an empty parameter
                init._convert_to_deepspeed_param(parameter)
                parameter.partition()  # type: ignore[attr-defined]
            read_parameter(files, stored, parameter)
        elif init is None:
            dist.broadcast(parameter.data, src=0)
        else:
            init._zero_init_param(parameter)  # takes rank 0's values
    broadcast_buffers(model, device)


@torch.no_grad()
def read_parameter(files: WeightFiles, name: str, parameter: ZeroParameter) -> None:
    """Read this rank's values of a parameter from files: the whole, or its shard in stage 3."""
    if not is_zero_parameter(parameter):
        parameter.data.copy_(files.read(name))
        return
    part = get_zero_part(parameter)
    if part.size == 0:
        return
    # A shard is a range of the flattened parameter, which may start and end within rows.
    row = max(1, get_full_shape(parameter)[1:].numel())
    start, end = part.offset // row, -(-(part.offset + part.size) // row)
    numbers = files.read(name, start, end).reshape(-1).narrow(0, part.offset - start * row, part.size)
    part.get_from_flat(parameter.ds_tensor.data).copy_(numbers)


def _iter_parameters(model: nn.Module) -> Iterator[list[tuple[nn.Module, str]]]:
    """Yield each parameter with its (module, name) locations: several if it is tied. In the same order on every
    rank."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    yield from places.values()
