"""Folder format of an adapter: peft's files, and the state needed to resume training.

Every rank reads the whole folder and keeps its shard; only rank 0 writes. So a folder does not depend on the number of
ranks.

Shapes: P numbers of an adapter.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from skyrl_train.models.adapter_files import WEIGHTS_FILE, AdapterFile, read_adapter
from tx.errors import ModelError
from tx.tinker.backends.torch.adapters import Adapter, Site
from tx.tinker.types import LORA_ALPHA

STATE_FILE = "optimizer.safetensors"
"""`mean.*`, `square.*` and `gradient.*` by the names of the matrices they belong to, where they exist; the number of
steps in its metadata; for adapters of experts, the flag `_SHARES_EXPERTS`."""
_SHARES_EXPERTS = "shares_experts"
_VECTORS = ("mean", "square", "gradient")


def write_adapter(
    adapter: Adapter, weights: torch.Tensor, folder: Path, base_model: str, target_modules: list[str]
) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, float32.

    Args:
        weights: [P] on the CPU.
        base_model: name of the base model in peft's config.
        target_modules: adapted layers in peft's config.
    """
    config = LoraConfig(
        r=adapter.lora.rank,
        lora_alpha=LORA_ALPHA,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    # Not in the constructor, which makes a set of them: its order is another in each process.
    config.target_modules = target_modules
    config.save_pretrained(str(folder))
    _save(
        _copy_shared_to_experts(adapter, _build_named_matrices(adapter, weights)), folder / WEIGHTS_FILE, "format", "pt"
    )


def write_state(adapter: Adapter, vectors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write optimizer state, step count and accumulated gradient, bit for bit.

    Args:
        vectors: [P] on the CPU, the existing ones of `_VECTORS`.
    """
    tensors = {
        f"{kind}.{name}": tensor
        for kind, vector in vectors.items()
        for name, tensor in _build_named_matrices(adapter, vector).items()
    }
    if any(site.num_experts is not None for site in adapter.sites):
        tensors[_SHARES_EXPERTS] = torch.tensor(adapter.lora.share_experts)
    _save(tensors, folder / STATE_FILE, "step", str(adapter.step))


def shares_experts(sites: Sequence[Site], folder: Path, *, by_weights: bool) -> bool | None:
    """Return whether experts share matrices in a checkpoint; None without experts, or if unknown.

    Args:
        sites: the layers of the model, in either layout.
        by_weights: where the optimizer file does not record it (missing, or written by an earlier release without
            moments and gradient), compare the experts' copies of the matrices that may be shared.

    Raises:
        ModelError: the folder cannot be read.
    """
    sites = [site.to_shared_experts() for site in sites if site.num_experts is not None]
    if not sites:
        return None
    if (folder / STATE_FILE).exists():
        with _open_state(folder) as file:
            names = set(file.keys())
            if _SHARES_EXPERTS in names:
                return bool(file.get_tensor(_SHARES_EXPERTS))
        if names:
            matrices = {name.partition(".")[2] for name in names}
            return any(key in matrices for key, _ in _iter_shared_keys(sites))
    if not by_weights:
        return None
    tensors = _read_file(folder).tensors
    copies = ([tensors[key] for key in of_experts if key in tensors] for _, of_experts in _iter_shared_keys(sites))
    return all(torch.equal(copy, each[0]) for each in copies for copy in each)


def read_into(adapter: Adapter, folder: Path, *, optimizer: bool, gradient: bool = False) -> None:
    """Load weights; the optimizer if requested, else a new one; the accumulated gradient if requested, else none.

    Raises:
        ModelError: the folder does not match or is damaged; the adapter is unchanged.
    """
    weights = _read_weights(adapter, folder)
    step, vectors = _read_state(adapter, folder) if optimizer or gradient else (0, {})
    adapter.weights.copy_(weights)
    adapter.changed()
    adapter.step = step if optimizer else 0
    adapter.mean, adapter.square = (vectors.get(kind) if optimizer else None for kind in ("mean", "square"))
    adapter.gradient = vectors.get("gradient") if gradient else None


def _build_named_matrices(adapter: Adapter, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a vector [P] as peft's matrices A and B of each layer, which are views of it. One that experts share has
    the name of their projection, without a number."""
    named = {}
    for site, matrices in zip(adapter.sites, adapter.split_matrices(vector), strict=True):
        for side, matrix in zip("AB", matrices, strict=True):
            stacked = {site.name: matrix} if matrix.dim() == 2 else dict(zip(site.layers, matrix, strict=True))
            named |= {_build_key(layer, side): each if side == "A" else each.t() for layer, each in stacked.items()}
    return named


def _build_key(layer: str, side: str) -> str:
    return f"base_model.model.{layer}.lora_{side}.weight"


def _iter_shared_keys(sites: Iterable[Site]) -> Iterator[tuple[str, list[str]]]:
    """Yield the key of each matrix that experts share, and the keys that peft has for it, one for each expert."""
    for site in sites:
        if site.shared is not None:
            side = site.shared.upper()
            yield _build_key(site.name, side), [_build_key(layer, side) for layer in site.layers]


def _copy_shared_to_experts(adapter: Adapter, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return matrices as peft and engines read them: a shared one as a copy for each expert, since they have no form
    of a shared one."""
    for key, of_experts in _iter_shared_keys(adapter.sites):
        matrix = named.pop(key)
        named |= {of_expert: matrix.clone() for of_expert in of_experts}
    return named


def _merge_expert_copies(adapter: Adapter, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return matrices with the copies for each expert of a shared one as one.

    Raises:
        ModelError: the experts' differ.
    """
    merged = dict(tensors)
    for key, of_experts in _iter_shared_keys(adapter.sites):
        copies = [merged.pop(of_expert) for of_expert in of_experts if of_expert in merged]
        if any(not torch.equal(copy, copies[0]) for copy in copies):
            raise ModelError(
                f"the checkpoint is damaged: {of_experts[0]} and adapters of other experts differ, but according to "
                "its optimizer state they are shared"
            )
        if len(copies) == len(of_experts):
            merged[key] = copies[0]
    return merged


def _save(tensors: Mapping[str, torch.Tensor], path: Path, key: str, value: str) -> None:
    """Save with one metadata entry: the order of several is random, and equal models must give equal files."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata={key: value})


def _read_file(folder: Path) -> AdapterFile:
    try:
        return read_adapter(folder)
    except ValueError as error:
        raise ModelError(str(error).replace(str(folder), "the checkpoint")) from error  # the client sees no path


def _read_weights(adapter: Adapter, folder: Path) -> torch.Tensor:
    """Return this rank's part of the weights, [p]."""
    file = _read_file(folder)
    rank, alpha = file.config.get("r"), file.config.get("lora_alpha")
    if rank != adapter.lora.rank or alpha != LORA_ALPHA:
        raise ModelError(
            f"the checkpoint has rank {rank} and alpha {alpha}, the model has rank {adapter.lora.rank} and alpha "
            f"{LORA_ALPHA}: load it into a model of the checkpoint's rank"
        )
    other = [field for field in ("use_dora", "use_rslora", "lora_bias") if file.config.get(field)]
    if other:
        raise ModelError(f"the checkpoint was trained with {other[0]}, which this model does not train")
    return _build_vector(adapter, _merge_expert_copies(adapter, file.tensors), "", "adapter")


@contextmanager
def _open_state(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / STATE_FILE, framework="pt") as file:
            yield file
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ModelError(f"the checkpoint's optimizer ({STATE_FILE}) is damaged: {error}", "server") from error


def _read_state(adapter: Adapter, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Read the number of steps, and the vectors present."""
    if not (folder / STATE_FILE).exists():
        raise ModelError("the checkpoint has no optimizer state: it was saved for sampling. Load it without optimizer")
    with _open_state(folder) as file:
        step = int((file.metadata() or {})["step"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    there = [kind for kind in _VECTORS if any(name.startswith(f"{kind}.") for name in tensors)]
    if step and not {"mean", "square"} <= set(there):
        raise ModelError(f"the checkpoint's optimizer ({STATE_FILE}) is damaged: it has no moments", "server")
    return step, {kind: _build_vector(adapter, tensors, f"{kind}.", "optimizer") for kind in there}


def _build_vector(adapter: Adapter, tensors: Mapping[str, Any], prefix: str, what: str) -> torch.Tensor:
    """Return this rank's part [p] of a vector on the adapter's device, from tensors by name.

    Raises:
        ModelError: others than the adapter's layers, other shapes, numbers that are not finite.
    """
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    result = torch.empty(adapter.num_weights)
    expected = _build_named_matrices(adapter, result)
    for name in {**expected, **found}:
        given, wanted = (list(each[name].shape) if name in each else "missing" for each in (found, expected))
        if given != wanted:
            raise ModelError(
                f"the checkpoint does not fit the model: {name} is {given} in the checkpoint and {wanted} in the model"
            )
    for name, view in expected.items():
        if what == "adapter" and not bool(found[name].isfinite().all()):
            raise ModelError(f"the checkpoint's {name} is not finite")
        view.copy_(found[name])
    return adapter.ranks.extract_part(result).to(adapter.weights.device, copy=adapter.ranks.size > 1)
