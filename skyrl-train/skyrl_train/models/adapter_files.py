"""Adapters in peft's folder format: `adapter_model.safetensors` and `adapter_config.json`.

Adapter-only weight syncs write the policy's adapters this way, one numbered folder per version; all kinds of engines
can load such a folder.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from skyrl_gym.whole_folders import replacing
from skyrl_train.distributed.sharded_tensor import copy_into, gather_full_tensor
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.models.lora import ADAPTER, find_adapters, get_transformers_model
from skyrl_train.types import JsonObject
from skyrl_train.utils.io import write_atomically

if TYPE_CHECKING:
    from peft import LoraConfig

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialization methods (peft's names, or prefixes of them) that move a part of the model's weights into the adapter:
such an adapter does not fit the original weights."""


def gather_adapter_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield A and B of every adapter, gathered, under peft's names, one at a time and in the same order on every rank.
    A collective.

    Args:
        model: a transformers model, or an object with one as `causal_lm`; sharded or not.
        dtype: dtype to cast to.
    """
    for adapter in find_adapters(get_transformers_model(model)):
        for name, matrix in adapter.matrices.items():
            yield name, gather_full_tensor(matrix, dtype)


def write_adapter_version(
    model: nn.Module, folder: Path, version: int, dtype: torch.dtype, rank: int
) -> dict[str, torch.Tensor]:
    """Write the policy's adapters for engines to `folder/version`, atomically, and delete all but the last two versions
    (an engine may be reading the previous one). A collective; rank 0 writes.

    Args:
        model, dtype: as for `gather_adapter_tensors`; use the engines' dtype, so that their values can be compared.
    Returns:
        on rank 0 the written tensors by name; {} on others.
    Raises:
        ConfigError: the initialization of these adapters changed the model's weights, which engines do not have.
    """
    config = _get_peft_config(model)
    if not can_be_sent_alone(config.init_lora_weights):
        raise ConfigError(
            "generator.weight_sync_strategy=adapter cannot be combined with "
            f"trainer.policy.model.lora.init_method={config.init_lora_weights!r}, which moves part of the model's "
            "weights into the adapters: engines would still have that part in the model. Use init_method=kaiming, or "
            "weight_sync_strategy=auto"
        )
    # On every rank, since each tensor is gathered by a collective. Copies: on a CPU, tensors of an unsharded model are
    # the live parameters, which the next step changes before the sent values are compared.
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in gather_adapter_tensors(model, dtype)}
    if rank != 0:
        return {}
    with replacing(folder / str(version)) as partial:
        _write(partial, tensors, config)
    versions = sorted((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), reverse=True)
    for old in versions[2:]:
        shutil.rmtree(folder / str(old))
    return tensors


def can_be_sent_alone(init_method: object) -> bool:
    """Return whether adapters with this initialization fit the original weights of the model."""
    return not (isinstance(init_method, str) and init_method.startswith(CHANGES_THE_MODEL))


def save_adapter(model: nn.Module, folder: str | Path, base_model_path: str) -> None:
    """Write adapters in their training dtype, for plain `peft.PeftModel.from_pretrained(base_model, folder)`. A
    collective; rank 0 writes.

    Args:
        model: as for `gather_adapter_tensors`.
        base_model_path: base model name stored for peft.
    """
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in gather_adapter_tensors(model, torch.float32)}
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(Path(folder), tensors, replace(_get_peft_config(model), base_model_name_or_path=base_model_path))


def _get_peft_config(model: nn.Module) -> "LoraConfig":
    return vars(get_transformers_model(model))["peft_config"][ADAPTER]


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], config: "LoraConfig") -> None:
    """Write into a folder, keeping its other files. Weights are written last: a folder that has them is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    replace(config, inference_mode=True).save_pretrained(str(folder))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS_FILE, save(contiguous, metadata={"format": "pt"}))


@dataclass(frozen=True)
class AdapterFile:
    """Content of a folder in peft's format."""

    config: JsonObject
    tensors: dict[str, torch.Tensor]
    """Adapter weights on the CPU, by peft's names."""


def read_adapter(folder: str | Path) -> AdapterFile:
    """Read an adapter in peft's format.

    Raises:
        ValueError: it is missing or corrupt.
    """
    path = Path(folder)
    try:
        config = json.loads((path / CONFIG_FILE).read_text())
        tensors = load_file(path / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"no adapter could be read from {path} ({CONFIG_FILE}, {WEIGHTS_FILE}): {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path / CONFIG_FILE} must contain an object; got {type(config).__name__}")
    return AdapterFile(config, tensors)


def load_adapter(model: nn.Module, folder: str | Path) -> None:
    """Load adapters that `save_adapter` or peft wrote into a model with adapters of the same layers and rank.

    Raises:
        CheckpointError: the file has other layers or shapes.
    """
    file = Path(folder) / WEIGHTS_FILE
    state = load_file(file)
    matrices = {
        name: matrix
        for adapter in find_adapters(get_transformers_model(model))
        for name, matrix in adapter.matrices.items()
    }
    # Compared before anything is copied: a file that does not fit leaves the model unchanged.
    differing = [name for name in {**matrices, **state} if _format_shape(state, name) != _format_shape(matrices, name)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"{file} does not fit the model's adapters: {name} is {_format_shape(state, name)} in the file and "
            f"{_format_shape(matrices, name)} in the model"
        )
    with torch.no_grad():
        for name, matrix in matrices.items():
            copy_into(matrix, state[name])


def _format_shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
