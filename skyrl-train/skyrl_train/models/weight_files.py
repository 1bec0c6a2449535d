"""Weights of a transformers model in safetensors files, read row by row: each rank reads what it holds, and no process
needs the whole model.

transformers renames tensors while it loads them and fuses some (experts that lie in files one by one). Its own tables
say which tensors of the files make which weight, so the values are those of `from_pretrained`, bit for bit.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import _get_resolved_checkpoint_files

from skyrl_train.errors import ConfigError

logger = logging.getLogger(__name__)

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Number formats of files that are read as they are. Others belong to quantized weights."""


class UnreadableWeights(Exception):
    """Weights that cannot be read in parts, only by `from_pretrained`: the reason."""


@dataclass
class _Source:
    """Tensors of the files that make one weight."""

    converter: WeightConverter | None
    """Operation of transformers that fuses them; None for one tensor under another name or the same."""

    keys: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the pattern of the converter that they match."""

    one_row_each: bool = False
    """True if row i is made of the i-th tensor of each pattern alone (experts)."""


class WeightFiles:
    """Safetensors files of a model. Holds no tensor; files are open until `close`.

    Args:
        model: on the meta device but for adapters: for its names and shapes.
        path: folder or hub name, as for `from_pretrained`.

    Raises:
        UnreadableWeights: `from_pretrained` would do more than to rename and fuse.
    """

    def __init__(self, model: PreTrainedModel, path: str):
        self._model = model
        self._handles = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for file in _safetensors_files(model, path):
                # Not mapped: pages of a file would count as this process's memory.
                handle = self._handles.enter_context(safe_open(file, framework="pt", backend="pread"))
                self._file_of |= dict.fromkeys(handle.keys(), handle)
            self._sources = self._plan()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        self._handles.close()

    def __contains__(self, name: str) -> bool:
        return name_in_files(name) in self._sources

    @torch.no_grad()
    def read(
        self, name: str, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read rows (of the first dimension) of a weight, in a tensor of their own.

        Args:
            name: of a parameter or buffer of the model, also of one with adapters.
            stop: None for all rows from `start` on.
            dtype: None: that of the files.
        """
        source = self._sources[name_in_files(name)]
        if source.converter is None:
            [[key]] = source.keys.values()
            return self._read_tensor(key, start, stop, dtype)
        if source.one_row_each:
            keys = {pattern: keys[start:stop] for pattern, keys in source.keys.items()}
            if not all(keys.values()):  # no row, which cannot be fused
                return self._fuse(name, {pattern: keys[:1] for pattern, keys in source.keys.items()}, dtype)[:0]
            return self._fuse(name, keys, dtype)
        return self._fuse(name, source.keys, dtype)[start:stop].clone()

    def _read_tensor(self, key: str, start: int, stop: int | None, dtype: torch.dtype | None) -> torch.Tensor:
        stored = self._file_of[key].get_slice(key)
        if start == stop:  # a rank without rows: safetensors knows no such rows behind the last
            start = stop = 0
        tensor = stored[start:stop] if stored.get_shape() else self._file_of[key].get_tensor(key)
        return tensor if dtype is None else tensor.to(dtype)

    def _fuse(self, name: str, keys: dict[str, list[str]], dtype: torch.dtype | None) -> torch.Tensor:
        return self._convert(name_in_files(name), keys, lambda key: self._read_tensor(key, 0, None, dtype))

    def _convert(self, name: str, keys: dict[str, list[str]], tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return what transformers makes of tensors. A converter keeps what it was given, so each call has its own."""
        converter = deepcopy(self._sources[name].converter)
        assert converter is not None
        for pattern, of_pattern in keys.items():
            for key in of_pattern:
                converter.add_tensor(name, key, pattern, tensor_of(key))  # type: ignore[arg-type]
        [tensor] = converter.convert(name, model=self._model, config=self._model.config).values()
        return tensor[0] if isinstance(tensor, list) else tensor

    # ---- plan

    def _plan(self) -> dict[str, _Source]:
        """Find the tensors of each weight, as `from_pretrained` does."""
        model, weights = self._model, _weights_of(self._model)
        transforms = get_model_conversion_mapping(model)
        converters = {
            pattern: each
            for each in transforms
            if isinstance(each, WeightConverter)
            for pattern in each.source_patterns
        }
        renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        unique_converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._sources: dict[str, _Source] = {}
        for key in sorted(self._file_of, key=dot_natural_key):
            prefix = model.base_model_prefix
            name, pattern = rename_source_key(key, renamings, unique_converters, prefix, weights)  # type: ignore[arg-type]
            if name not in weights and key in weights:
                name, pattern = rename_source_key(key, [], [], prefix, weights)
            if name in weights:
                converter = None if pattern is None else converters[pattern]
                source = self._sources.setdefault(name, _Source(converter))
                source.keys.setdefault(pattern or "", []).append(key)
        # Exports undo the renaming.
        model._weight_conversions = [each for each in transforms if each.was_used()]  # type: ignore[assignment]
        for name, source in self._sources.items():
            self._check(name, source, weights[name].shape)
        return self._with_tied_names(weights)

    def _check(self, name: str, source: _Source, shape: torch.Size) -> None:
        """Compare shapes and number formats; fused weights are converted without values."""
        for key in (key for keys in source.keys.values() for key in keys):
            if (form := self._file_of[key].get_slice(key).get_dtype()) not in _FLOATS:
                raise UnreadableWeights(f"{key} holds numbers of the type {form}")
        if source.converter is None:
            keys = [key for keys in source.keys.values() for key in keys]
            if len(keys) > 1:
                raise UnreadableWeights(f"{' and '.join(keys)} are both {name}")
            found = torch.Size(self._file_of[keys[0]].get_slice(keys[0]).get_shape())
        else:
            if len(source.converter.target_patterns) > 1:
                raise UnreadableWeights(f"{next(iter(source.keys.values()))[0]} is split into several weights")
            try:
                found = self._convert(name, source.keys, self._shape_only).shape
            except Exception as error:  # whatever a conversion raises at tensors that it does not expect
                raise UnreadableWeights(f"{name} cannot be fused: {error}") from error
            source.one_row_each = _keeps_rows(source.converter.operations) and all(
                len(keys) == shape[0] for keys in source.keys.values()
            )
        if found != shape:
            raise UnreadableWeights(f"{name} has the shape {list(found)} in the files and {list(shape)} in the model")

    def _shape_only(self, key: str) -> torch.Tensor:
        stored = self._file_of[key].get_slice(key)
        return torch.empty(stored.get_shape(), dtype=_FLOATS[stored.get_dtype()], device="meta")

    def _with_tied_names(self, weights: dict[str, torch.Tensor]) -> dict[str, _Source]:
        """Return the sources of all names of the model. A tied weight has several, and lies in files under one."""
        names_of: dict[int, list[str]] = {}
        for name, weight in weights.items():
            names_of.setdefault(id(weight), []).append(name)
        sources = {}
        for names in names_of.values():
            stored = [name for name in names if name in self._sources]
            if len(stored) != 1:
                found = f"lies in the files under {len(stored)} names" if stored else "is not in the files"
                raise UnreadableWeights(f"{' = '.join(names)} {found}")
            sources |= dict.fromkeys(names, self._sources[stored[0]])
        return sources


def _weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers on the meta device that belong into files, by their names there."""
    weights = model.state_dict(keep_vars=True)
    return {name_in_files(name): weight for name, weight in weights.items() if weight.is_meta}


def open_on_all_ranks(model: PreTrainedModel, path: str, refusal: str | None = None) -> WeightFiles | None:
    """Open the files of a model on every rank of the default process group, or on none where one of them cannot read
    its part: rank 0 must then load the whole model, and says so. A collective.

    Args:
        refusal: reason not to open them.
    """
    files, problem = None, refusal
    if refusal is None:
        try:
            files = WeightFiles(model, path)
        except (UnreadableWeights, OSError) as error:
            problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    problem = next((each for each in problems if each is not None), None)
    if problem is None:
        return files
    if files is not None:
        files.close()
    if dist.get_rank() == 0:
        logger.warning("rank 0 loads all weights of %s, for every rank: %s", path, problem)
    return None


def name_in_files(name: str) -> str:
    """Return the name of a weight without what adapters put into it."""
    return name.replace(".base_layer.", ".")


def _safetensors_files(model: PreTrainedModel, path: str) -> list[str]:
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnreadableWeights("its weights are quantized")
    if (Path(path) / "adapter_config.json").exists():
        raise UnreadableWeights("the folder has an adapter beside the model")
    files, _ = _get_resolved_checkpoint_files(
        path,
        variant=None,
        gguf_file=None,
        use_safetensors=None,
        user_agent=None,
        is_remote_code=model.is_custom_code(),
        transformers_explicit_filename=getattr(model.config, "transformers_weights", None),
    )
    if not files or not all(file.endswith(".safetensors") for file in files):
        raise UnreadableWeights("its weights are not in safetensors files")
    return files


def _keeps_rows(operations: Sequence[ConversionOps]) -> bool:
    """Return whether tensors are stacked to rows, which nothing then mixes."""
    first, *others = operations
    return (isinstance(first, MergeModulelist) and first.dim == 0) and all(
        (isinstance(each, Concatenate) and each.dim > 0)
        or (isinstance(each, Transpose) and min(each.dim0, each.dim1) > 0)
        for each in others
    )


# ---- the model without its weights


def apply_dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give weights that were not loaded the precision that `from_pretrained` loads them in: in some models of bfloat16
    or float16 a few stay float32."""
    planned = planned_dtypes(model, dtype)
    for name, weight in model.state_dict(keep_vars=True).items():
        weight.data = weight.data.to(planned(name_in_files(name)) or weight.dtype)


class Float32Module(NamedTuple):
    """A module that stays float32 in a model of another precision."""

    module: nn.Module
    cast_inside: list[nn.Module]
    """Modules inside that do not."""


def modules_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> list[Float32Module]:
    """Return, parents first, the largest modules whose parameters all stay float32 in a model of another precision,
    such as the routers of ERNIE 4.5, and those whose own parameters do, such as an attention with sinks.

    Raises:
        ConfigError: only some of a module's own parameters do, or those of a module around transformer blocks.
    """
    planned = planned_dtypes(model, dtype)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {key for key, name in names.items() if planned(name) == torch.float32}
    blocks = {id(block) for block in transformer_blocks(model)}
    found: list[Float32Module] = []
    inside: set[int] = set()
    for name, module in model.named_modules() if kept else ():  # parents first
        own, every = ({id(parameter) for parameter in module.parameters(recurse)} for recurse in (False, True))
        if id(module) in inside or not every & kept or not (own & kept or every <= kept):
            continue
        if every <= kept:
            found.append(Float32Module(module, []))
            inside.update(map(id, module.modules()))
            continue
        first, others = names[min(own & kept, key=lambda key: names[key])], sorted(names[key] for key in own - kept)
        rule = f"trainer.bf16=true: transformers keeps {first} in float32"
        if others:
            raise ConfigError(
                f"{rule}, but not {', '.join(others[:3])} of the same module {name or 'model'} "
                f"({type(module).__name__}), and parameters of a module are cast together; set trainer.bf16=false"
            )
        if blocks & {id(each) for each in module.modules()} - {id(module)}:
            raise ConfigError(
                f"{rule} in the module {name or 'model'} ({type(module).__name__}) around the transformer blocks, and "
                "the parameters beside blocks are cast together; set trainer.bf16=false"
            )
        found.append(Float32Module(module, []))
        for child in _called_inside(module):
            if any(id(parameter) not in kept for parameter in child.parameters()):
                found[-1].cast_inside.append(child)
            else:  # it belongs to the module, which may read its weights without calling it
                inside.update(map(id, child.modules()))
    return found


def _called_inside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules directly inside, those in lists and dicts of modules one by one."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called_inside(child)
        else:
            yield child


def planned_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Return a function from the name of a weight to the precision that transformers keeps it in, None for `dtype`."""
    plan = {glob.replace("*", ".*"): planned for glob, planned in model._get_dtype_plan(dtype).items()}
    return lambda name: next((planned for pattern, planned in plan.items() if re.search(pattern, name)), None)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, files: WeightFiles) -> None:
    """Give a model on the meta device its buffers, on the CPU: read, or computed from its config as `from_pretrained`
    does (rotary frequencies), by the model's own initialization."""
    persistent = set(model.state_dict(keep_vars=True))
    for module_name, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            full_name = f"{module_name}.{name}" if module_name else name
            if full_name in persistent:
                module._buffers[name] = files.read(full_name, dtype=buffer.dtype)
                module._buffers[name]._is_hf_initialized = True  # type: ignore[union-attr]
            else:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        module._is_hf_initialized = False  # type: ignore[assignment]
    for parameter in model.parameters():  # read later, or an adapter's: nothing is drawn for them
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Let parameters on the meta device be tensors on the CPU of the same shapes, without memory of their own: for
    code that makes something beside each layer, where the layer is."""
    places = _places_of_meta_parameters(model.modules())
    filled = _fill(places, lambda parameter: torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
    yield
    for parameter, placeholder in filled:
        parameter.requires_grad = placeholder.requires_grad  # which adapters have changed
    _empty(places)


@contextmanager
def values_in_forward(model: PreTrainedModel, files: WeightFiles, max_numbers: int = 0) -> Iterator[None]:
    """Give a model on the meta device its values on the CPU: those of a block for each of its forwards anew, all others
    until the end. No more than that is in memory.

    Args:
        max_numbers: parameters that may be in memory together; blocks that are among them are not read again.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def read(parameter: nn.Parameter) -> torch.Tensor:
        return files.read(names[id(parameter)], dtype=parameter.dtype)

    blocks = transformer_blocks(model)
    of_blocks = {id(module) for block in blocks for module in block.modules()}
    others = _places_of_meta_parameters(module for module in model.modules() if id(module) not in of_blocks)
    room = max_numbers - sum({id(parameter): parameter.numel() for *_, parameter in others}.values())
    # The next block needs room beside those that stay.
    while blocks and room >= sum(map(_num_parameters, blocks[:2])):
        room -= _num_parameters(blocks[0])
        others += _places_of_meta_parameters(blocks.pop(0).modules())
    with ExitStack() as hooks:
        _fill(others, read)
        hooks.callback(_empty, others)
        for block in blocks:
            places = _places_of_meta_parameters(block.modules())

            def before(*_: object, places: Sequence[_Place] = places) -> None:
                _fill(places, read)

            def after(*_: object, places: Sequence[_Place] = places) -> None:
                _empty(places)

            hooks.callback(block.register_forward_pre_hook(before).remove)
            hooks.callback(block.register_forward_hook(after, always_call=True).remove)
        yield


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers says must not be split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


_Place = tuple[nn.Module, str, nn.Parameter]
"""Module, name there, parameter on the meta device."""


def _places_of_meta_parameters(modules: Iterable[nn.Module]) -> list[_Place]:
    return [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fill(
    places: Sequence[_Place], value_of: Callable[[nn.Parameter], torch.Tensor]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Put parameters with values in the places of those on the meta device; tied ones stay tied. Returns: the pairs."""
    filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module, name, parameter in places:
        if id(parameter) not in filled:
            value = nn.Parameter(value_of(parameter), requires_grad=parameter.requires_grad)
            filled[id(parameter)] = parameter, value
        module._parameters[name] = filled[id(parameter)][1]
    return list(filled.values())


def _empty(places: Sequence[_Place]) -> None:
    """Put the parameters on the meta device back."""
    for module, name, parameter in places:
        module._parameters[name] = parameter
