"""Reader of transformers models in safetensors files, row by row: each rank reads only its shard, and no process needs
the whole model.

transformers renames tensors while loading and fuses some (separately stored experts). Its own tables give the source
tensors of each weight, so the values are bit-exact with `from_pretrained`.
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
"""Number formats of files that are read directly. Others belong to quantized weights."""


class UnreadableWeights(Exception):
    """Weights that cannot be read in parts, only by `from_pretrained`: the reason."""


@dataclass
class _Source:
    """Source tensors of one weight."""

    converter: WeightConverter | None
    """Operation of transformers that fuses them; None for a single, possibly renamed tensor."""

    keys: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the pattern of the converter that they match."""

    one_row_each: bool = False
    """True if row i is made of only the i-th tensor of each pattern (experts)."""


class WeightFiles:
    """Safetensors files of a model. Holds no tensor; files are open until `close`.

    Args:
        model: on the meta device except for adapters: provides names and shapes.
        path: folder or hub name, as for `from_pretrained`.

    Raises:
        UnreadableWeights: `from_pretrained` would do more than rename and fuse.
    """

    def __init__(self, model: PreTrainedModel, path: str):
        self._model = model
        self._handles = ExitStack()
        self._file_of: dict[str, Any] = {}
        try:
            for file in _find_safetensors_files(model, path):
                # Not memory-mapped: pages of a file would count as this process's memory.
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
        return get_name_in_files(name) in self._sources

    @torch.no_grad()
    def read(
        self, name: str, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read rows (of the first dimension) of a weight into a new tensor.

        Args:
            name: name of a parameter or buffer of the model, with or without adapters.
            stop: None for all rows from `start` on.
            dtype: None: the file's dtype.
        """
        source = self._sources[get_name_in_files(name)]
        if source.converter is None:
            [[key]] = source.keys.values()
            return self._read_tensor(key, start, stop, dtype)
        if source.one_row_each:
            keys = {pattern: keys[start:stop] for pattern, keys in source.keys.items()}
            if not all(keys.values()):  # no rows, which cannot be fused
                return self._fuse(name, {pattern: keys[:1] for pattern, keys in source.keys.items()}, dtype)[:0]
            return self._fuse(name, keys, dtype)
        return self._fuse(name, source.keys, dtype)[start:stop].clone()

    def _read_tensor(self, key: str, start: int, stop: int | None, dtype: torch.dtype | None) -> torch.Tensor:
        stored = self._file_of[key].get_slice(key)
        if start == stop:  # a rank without rows: safetensors rejects empty slices after the last row
            start = stop = 0
        tensor = stored[start:stop] if stored.get_shape() else self._file_of[key].get_tensor(key)
        return tensor if dtype is None else tensor.to(dtype)

    def _fuse(self, name: str, keys: dict[str, list[str]], dtype: torch.dtype | None) -> torch.Tensor:
        return self._convert(get_name_in_files(name), keys, lambda key: self._read_tensor(key, 0, None, dtype))

    def _convert(self, name: str, keys: dict[str, list[str]], tensor_of: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Convert tensors with transformers. A converter keeps its inputs, so each call uses a new one."""
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
        model, weights = self._model, _get_file_weights(self._model)
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
        return self._add_tied_names(weights)

    def _check(self, name: str, source: _Source, shape: torch.Size) -> None:
        """Compare shapes and number formats; fused weights are converted without values."""
        for key in (key for keys in source.keys.values() for key in keys):
            if (form := self._file_of[key].get_slice(key).get_dtype()) not in _FLOATS:
                raise UnreadableWeights(f"{key} has the dtype {form}")
        if source.converter is None:
            keys = [key for keys in source.keys.values() for key in keys]
            if len(keys) > 1:
                raise UnreadableWeights(f"{' and '.join(keys)} are both {name}")
            found = torch.Size(self._file_of[keys[0]].get_slice(keys[0]).get_shape())
        else:
            if len(source.converter.target_patterns) > 1:
                raise UnreadableWeights(f"{next(iter(source.keys.values()))[0]} would be split into several weights")
            try:
                found = self._convert(name, source.keys, self._get_meta_tensor).shape
            except Exception as error:  # any error of a conversion with unexpected tensors
                raise UnreadableWeights(f"{name} cannot be fused: {error}") from error
            source.one_row_each = _is_row_preserving(source.converter.operations) and all(
                len(keys) == shape[0] for keys in source.keys.values()
            )
        if found != shape:
            raise UnreadableWeights(f"{name} has the shape {list(found)} in the files and {list(shape)} in the model")

    def _get_meta_tensor(self, key: str) -> torch.Tensor:
        stored = self._file_of[key].get_slice(key)
        return torch.empty(stored.get_shape(), dtype=_FLOATS[stored.get_dtype()], device="meta")

    def _add_tied_names(self, weights: dict[str, torch.Tensor]) -> dict[str, _Source]:
        """Return the sources of all names of the model. A tied weight has several names, but is stored under one."""
        names_of: dict[int, list[str]] = {}
        for name, weight in weights.items():
            names_of.setdefault(id(weight), []).append(name)
        sources = {}
        for names in names_of.values():
            stored = [name for name in names if name in self._sources]
            if len(stored) != 1:
                found = f"is stored under {len(stored)} names" if stored else "is missing in the files"
                raise UnreadableWeights(f"{' = '.join(names)} {found}")
            sources |= dict.fromkeys(names, self._sources[stored[0]])
        return sources


def _get_file_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers on the meta device that belong into files, by their names there."""
    weights = model.state_dict(keep_vars=True)
    return {get_name_in_files(name): weight for name, weight in weights.items() if weight.is_meta}


def open_on_all_ranks(model: PreTrainedModel, path: str, refusal: str | None = None) -> WeightFiles | None:
    """Open the files of a model on every rank of the default process group, or on none if any rank cannot read its
    part: rank 0 must then load the whole model, and logs the reason. A collective.

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


def get_name_in_files(name: str) -> str:
    """Remove the parts added by adapters from the name of a weight."""
    return name.replace(".base_layer.", ".")


def _find_safetensors_files(model: PreTrainedModel, path: str) -> list[str]:
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnreadableWeights("its weights are quantized")
    if (Path(path) / "adapter_config.json").exists():
        raise UnreadableWeights("the folder contains an adapter in addition to the model")
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
        raise UnreadableWeights("its weights are not stored in safetensors files")
    return files


def _is_row_preserving(operations: Sequence[ConversionOps]) -> bool:
    """Return whether tensors are stacked to rows that later operations do not mix."""
    first, *others = operations
    return (isinstance(first, MergeModulelist) and first.dim == 0) and all(
        (isinstance(each, Concatenate) and each.dim > 0)
        or (isinstance(each, Transpose) and min(each.dim0, each.dim1) > 0)
        for each in others
    )


# ---- the model without its weights


def apply_dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert weights that were not loaded to the precision of `from_pretrained`: some models keep a few weights in
    float32."""
    planned = plan_dtypes(model, dtype)
    for name, weight in model.state_dict(keep_vars=True).items():
        weight.data = weight.data.to(planned(get_name_in_files(name)) or weight.dtype)


class Float32Module(NamedTuple):
    """Module that stays float32 in a model of another precision."""

    module: nn.Module
    cast_inside: list[nn.Module]
    """Submodules that do not."""


def find_float32_modules(model: PreTrainedModel, dtype: torch.dtype) -> list[Float32Module]:
    """Return, parents first, the largest modules whose parameters all stay float32 in a model of another precision,
    such as the routers of ERNIE 4.5, and modules whose direct parameters do, such as an attention with sinks.

    Raises:
        ConfigError: only some of a module's direct parameters do, or parameters of a module around transformer blocks.
    """
    planned = plan_dtypes(model, dtype)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {key for key, name in names.items() if planned(name) == torch.float32}
    blocks = {id(block) for block in get_transformer_blocks(model)}
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
        rule = f"trainer.bf16=true: transformers loads {first} in float32"
        if others:
            raise ConfigError(
                f"{rule}, but not {', '.join(others[:3])} of the same module {name or 'model'} "
                f"({type(module).__name__}), and parameters of a module are cast together; set trainer.bf16=false"
            )
        if blocks & {id(each) for each in module.modules()} - {id(module)}:
            raise ConfigError(
                f"{rule} in the module {name or 'model'} ({type(module).__name__}) outside the transformer blocks, "
                "and parameters outside blocks are cast together; set trainer.bf16=false"
            )
        found.append(Float32Module(module, []))
        for child in _iter_submodules(module):
            if any(id(parameter) not in kept for parameter in child.parameters()):
                found[-1].cast_inside.append(child)
            else:  # it belongs to the module, which may read its weights without calling it
                inside.update(map(id, child.modules()))
    return found


def _iter_submodules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the direct submodules, with lists and dicts of modules expanded."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iter_submodules(child)
        else:
            yield child


def plan_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Return a function from the name of a weight to the precision that transformers keeps it in, None for `dtype`."""
    plan = {glob.replace("*", ".*"): planned for glob, planned in model._get_dtype_plan(dtype).items()}
    return lambda name: next((planned for pattern, planned in plan.items() if re.search(pattern, name)), None)


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, files: WeightFiles) -> None:
    """Fill the buffers of a model on the meta device, on the CPU: read from files, or computed from its config by the
    model's initialization, as in `from_pretrained` (rotary frequencies)."""
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
    for parameter in model.parameters():  # read later, or an adapter's: not initialized
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()


@contextmanager
def use_placeholders(model: nn.Module) -> Iterator[None]:
    """Replace parameters on the meta device by CPU tensors of the same shapes that use no memory, for code that creates
    modules on each layer's device."""
    places = _find_meta_parameters(model.modules())
    filled = _fill(places, lambda parameter: torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
    yield
    for parameter, placeholder in filled:
        parameter.requires_grad = placeholder.requires_grad  # which adapters have changed
    _empty(places)


@contextmanager
def load_values_in_forward(model: PreTrainedModel, files: WeightFiles, max_numbers: int = 0) -> Iterator[None]:
    """Load the values of a model on the meta device to the CPU on demand: blocks for each of their forwards, all others
    until exit. Memory is bounded accordingly.

    Args:
        max_numbers: number of parameters that may be in memory together; blocks within it are read only once.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def read(parameter: nn.Parameter) -> torch.Tensor:
        return files.read(names[id(parameter)], dtype=parameter.dtype)

    blocks = get_transformer_blocks(model)
    of_blocks = {id(module) for block in blocks for module in block.modules()}
    others = _find_meta_parameters(module for module in model.modules() if id(module) not in of_blocks)
    room = max_numbers - sum({id(parameter): parameter.numel() for *_, parameter in others}.values())
    # the next block must fit next to the resident ones
    while blocks and room >= sum(map(_count_parameters, blocks[:2])):
        room -= _count_parameters(blocks[0])
        others += _find_meta_parameters(blocks.pop(0).modules())
    with ExitStack() as hooks:
        _fill(others, read)
        hooks.callback(_empty, others)
        for block in blocks:
            places = _find_meta_parameters(block.modules())

            def on_before(*_: object, places: Sequence[_Place] = places) -> None:
                _fill(places, read)

            def on_after(*_: object, places: Sequence[_Place] = places) -> None:
                _empty(places)

            hooks.callback(block.register_forward_pre_hook(on_before).remove)
            hooks.callback(block.register_forward_hook(on_after, always_call=True).remove)
        yield


def get_transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers says must not be split over devices."""
    names = set(getattr(model, "_no_split_modules", None) or [])
    return [module for module in model.modules() if type(module).__name__ in names]


_Place = tuple[nn.Module, str, nn.Parameter]
"""Module, name there, parameter on the meta device."""


def _find_meta_parameters(modules: Iterable[nn.Module]) -> list[_Place]:
    return [
        (module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fill(
    places: Sequence[_Place], value_of: Callable[[nn.Parameter], torch.Tensor]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Replace the parameters on the meta device by ones with values; tied ones stay tied. Returns the pairs."""
    filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module, name, parameter in places:
        if id(parameter) not in filled:
            value = nn.Parameter(value_of(parameter), requires_grad=parameter.requires_grad)
            filled[id(parameter)] = parameter, value
        module._parameters[name] = filled[id(parameter)][1]
    return list(filled.values())


def _empty(places: Sequence[_Place]) -> None:
    """Restore the parameters on the meta device."""
    for module, name, parameter in places:
        module._parameters[name] = parameter
