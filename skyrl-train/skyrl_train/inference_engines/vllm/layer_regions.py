"""Weight verification for layers of a vLLM model in this process: the part of a checkpoint tensor in each layer, and
its values as the layer computes with them.

A table of vLLM's kinds of layers (linear, vocabulary, experts), not of models. Shards are derived from the sizes and
ranks that a layer declares, independent of loaders, so that errors of a loader are detected. Unknown kinds have no
regions: their tensors count as unverified.

A weight stored as in the checkpoint is read directly. A linear layer on a CPU multiplies by an opaque packed copy: its
columns are read as products with one-hot rows, which are exact in every float format (products with 1 and 0, summed
with zeros).
"""

from dataclasses import dataclass
from typing import Any

import torch

from skyrl_train.weight_sync.fingerprint import VerificationSample
from skyrl_train.weight_sync.one_hot import as_computed, columns_by_products

Slices = tuple[slice | int, ...]
VllmLayer = Any
"""Layer of a vLLM class, imported only in its worker processes."""


@dataclass(frozen=True)
class Region:
    """Part of a checkpoint tensor in a layer of this process.

    Attributes:
        layer: vLLM's layer.
        parameter: name of the layer's parameter.
        source: indices of the part in the checkpoint tensor.
        held: indices in the parameter.
        computed: read by products (of a matrix; `held` then has only rows) instead of from the parameter.
    """

    layer: VllmLayer
    parameter: str
    source: Slices
    held: Slices
    computed: bool = False

    def sample_expected(self, tensor: torch.Tensor, sampling: VerificationSample) -> torch.Tensor:
        """Sample the part of a full tensor as sent by the trainer, in the layer's dtype."""
        part = tensor[self.source]
        if self.computed:
            return as_computed(part[:, self._get_columns(sampling)].t().to(self.layer.weight.dtype))
        return _sample_rows(part, sampling).to(getattr(self.layer, self.parameter).dtype)

    def count_bytes(self, tensor: torch.Tensor) -> int:
        """Count the bytes of the part in the layer's dtype."""
        return tensor[self.source].numel() * getattr(self.layer, self.parameter).itemsize

    def _get_columns(self, sampling: VerificationSample) -> slice:
        """Return the sampled columns, equal for all parts of a layer, so that one product is enough."""
        rows, columns = _get_matrix_shape(self.layer)
        return sampling.of(columns, rows * columns * self.layer.weight.itemsize)


class LayerReader:
    """Reader of the current values of regions. Read the regions of one layer in sequence, since common results are
    cached.
    """

    def __init__(self, sampling: VerificationSample):
        self._sampling = sampling
        self._key: tuple[int, str] | None = None
        self._kept = torch.empty(0)

    def sample_loaded(self, region: Region) -> torch.Tensor:
        """Sample a region's current values; counterpart of `Region.sample_expected`."""
        if region.computed:
            columns = region._get_columns(self._sampling)
            return self._keep(region, lambda: _get_matrix_columns(region.layer, columns))[:, region.held[0]]
        stored = self._keep(region, lambda: _to_checkpoint_order(region.layer, region.parameter))
        return _sample_rows(stored[region.held], self._sampling)

    def _keep(self, region: Region, read: Any) -> torch.Tensor:
        key = (id(region.layer), region.parameter)
        if self._key != key:
            self._key, self._kept = key, read()
        return self._kept


def find_layer_regions(layer: torch.nn.Module, parameter: str, part: int | None, shape: torch.Size) -> list[Region]:
    """Find the regions of a checkpoint tensor of `shape` in a layer; empty if unknown.

    Args:
        part: index of the tensor in a fused layer (q, k, v; gate, up); None: all of them.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(layer, LinearBase):
        return _find_linear_regions(layer, parameter, part, shape)
    if isinstance(layer, VocabParallelEmbedding):
        return _find_vocabulary_regions(layer, parameter, shape)
    stored = layer._parameters.get(parameter)
    if stored is None or stored.shape != shape or part is not None:
        return []
    return [Region(layer, parameter, _find_whole_region(shape), _find_whole_region(shape))]


def _find_whole_region(shape: torch.Size) -> Slices:
    return tuple(slice(0, size) for size in shape)


# ---- linear layers


@dataclass(frozen=True)
class _Shard:
    """Local rows of one tensor of a layer."""

    start: int
    size: int
    of: int


def _find_linear_regions(layer: VllmLayer, parameter: str, part: int | None, shape: torch.Size) -> list[Region]:
    shards, columns = _find_shards(layer)
    picked = shards if part is None else shards[part : part + 1]
    if sum(shard.of for shard in picked) != shape[0] or parameter not in ("weight", "bias"):
        return []
    if parameter == "weight" and (len(shape) != 2 or shape[1] != layer.input_size):
        return []
    held_start = sum(shard.size for shard in shards[: part or 0])
    regions = []
    source_start = 0
    for shard in picked:
        source = slice(source_start + shard.start, source_start + shard.start + shard.size)
        held = slice(held_start, held_start + shard.size)
        regions += (
            _build_matrix_regions(layer, source, columns, held)
            if parameter == "weight"
            else [_build_bias_regions(layer, source, held)]
        )
        source_start += shard.of
        held_start += shard.size
    return regions


def _find_shards(layer: VllmLayer) -> tuple[list[_Shard], slice]:
    """Find the local rows of each tensor of a linear layer, and their common columns; no rows if unknown."""
    from vllm.model_executor.layers import linear

    rank, size = layer.tp_rank, layer.tp_size
    all_columns = slice(0, layer.input_size)
    if _is_loaded_as(layer, linear.QKVParallelLinear):
        copies = layer.num_kv_head_replicas  # replicas of a key-value head, if fewer heads than processes
        query, key, value = (
            layer.num_heads * layer.head_size,
            *(layer.num_kv_heads * head_size for head_size in (layer.head_size, layer.v_head_size)),
        )
        return [
            _Shard(rank * query, query, size * query),
            _Shard(rank // copies * key, key, size // copies * key),
            _Shard(rank // copies * value, value, size // copies * value),
        ], all_columns
    if _is_loaded_as(layer, linear.MergedColumnParallelLinear):
        return [_Shard(rank * (rows // size), rows // size, rows) for rows in layer.output_sizes], all_columns
    if _is_loaded_as(layer, linear.ColumnParallelLinear):
        rows = layer.output_size // size
        return [_Shard(rank * rows, rows, layer.output_size)], all_columns
    if _is_loaded_as(layer, linear.RowParallelLinear):
        width = layer.input_size // size
        return [_Shard(0, layer.output_size, layer.output_size)], slice(rank * width, (rank + 1) * width)
    if _is_loaded_as(layer, linear.ReplicatedLinear):
        return [_Shard(0, layer.output_size, layer.output_size)], all_columns
    return [], all_columns


def _is_loaded_as(layer: VllmLayer, kind: type) -> bool:
    """Return whether a layer shards its weights like `kind`; False for a custom loader."""
    loaders = ("weight_loader", "weight_loader_v2")
    return isinstance(layer, kind) and all(
        getattr(type(layer), loader, None) is getattr(kind, loader, None) for loader in loaders
    )


def _build_matrix_regions(layer: VllmLayer, rows: slice, columns: slice, held_rows: slice) -> list[Region]:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if not isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return []
    if hasattr(layer, "cpu_linear") and not _is_lookup(layer):
        return [Region(layer, "weight", (rows, columns), (held_rows,), computed=True)]
    if layer.weight.shape != _get_matrix_shape(layer):
        return []  # swizzled for a kernel
    return [Region(layer, "weight", (rows, columns), (held_rows, slice(0, columns.stop - columns.start)))]


def _build_bias_regions(layer: VllmLayer, rows: slice, held_rows: slice) -> Region:
    return Region(layer, "bias", (rows,), (held_rows,))


def _get_matrix_shape(layer: VllmLayer) -> tuple[int, int]:
    """Return the shape of a layer's matrix in this process: outputs, inputs."""
    if hasattr(layer, "num_embeddings_per_partition"):
        return layer.num_embeddings_per_partition, layer.embedding_dim
    shards, columns = _find_shards(layer)
    return sum(shard.size for shard in shards), columns.stop - columns.start


def _get_matrix_columns(layer: VllmLayer, columns: slice) -> torch.Tensor:
    """Return columns of the matrix that a layer multiplies by, one per row: [columns, outputs]."""
    weight = layer.weight
    return columns_by_products(
        lambda rows: layer.quant_method.apply(layer, rows),
        _get_matrix_shape(layer),
        columns,
        weight.dtype,
        weight.device,
    )


# ---- vocabularies


def _find_vocabulary_regions(layer: VllmLayer, parameter: str, shape: torch.Size) -> list[Region]:
    shard = layer.shard_indices
    if shard.added_vocab_end_index > shard.added_vocab_start_index or shape[0] != layer.org_vocab_size:
        return []
    rows = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
    held = slice(0, rows.stop - rows.start)
    if parameter == "bias":
        return [_build_bias_regions(layer, rows, held)]
    if parameter != "weight" or shape[1:] != (layer.embedding_dim,):
        return []
    return _build_matrix_regions(layer, rows, slice(0, layer.embedding_dim), held)


def _is_lookup(layer: VllmLayer) -> bool:
    """Return whether a vocabulary layer is an embedding lookup; an LM head multiplies."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)


# ---- experts


def is_experts(layer: VllmLayer) -> bool:
    """Return whether a layer has expert weights."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    return isinstance(layer, RoutedExperts)


def find_expert_regions(layer: VllmLayer, kind: str, expert: int | None, shape: torch.Size) -> list[Region]:
    """Find the regions of a tensor of `shape` in an expert layer; empty if unknown or not local.

    Args:
        kind: `gate`, `up`, `gate_up` or `down`.
        expert: index; None: the tensor stacks all experts.
    """
    experts = _find_local_experts(layer, expert, shape)
    if experts is None or not _is_known_layout(layer):
        return []
    source_experts, held_experts = experts
    config = layer.moe_config
    *_, rows, columns = shape
    size, rank = config.tp_size, config.tp_rank
    if kind == "down":
        width = columns // size
        source = (slice(0, rows), slice(rank * width, (rank + 1) * width))
        return [
            Region(layer, "w2_weight", (*source_experts, *source), (*held_experts, slice(0, rows), slice(0, width)))
        ]
    halves = ("gate", "up") if kind == "gate_up" else (kind,)
    height = rows // len(halves)
    here = height // size
    regions = []
    for index, half in enumerate(halves):
        start = index * height + rank * here
        held_start = 0 if half == "gate" else _get_gate_height(layer)
        regions.append(
            Region(
                layer,
                "w13_weight",
                (*source_experts, slice(start, start + here), slice(0, columns)),
                (*held_experts, slice(held_start, held_start + here), slice(0, columns)),
            )
        )
    return regions


def _find_local_experts(layer: VllmLayer, expert: int | None, shape: torch.Size) -> tuple[Slices, Slices] | None:
    """Locate this process's experts: indices in the tensor (empty for a single expert's tensor) and in the layer."""
    config, manager = layer.moe_config, layer.expert_map_manager
    if config.num_experts != config.num_logical_experts or manager.num_fused_shared_experts:
        return None
    here = manager.get_local_expert_ids()
    if expert is not None:
        if expert not in here or len(shape) != 2:
            return None
        local = manager.map_global_to_local(expert)
        return (), (local,)
    in_order = here == list(range(here[0], here[0] + len(here)))
    if len(shape) != 3 or shape[0] != config.num_logical_experts or not in_order:
        return None
    return (slice(here[0], here[0] + len(here)),), (slice(0, len(here)),)


def _get_gate_height(layer: VllmLayer) -> int:
    """Return the number of rows before `up`, with padding. (During loading, parameters have no padding.)"""
    if layer.quant_method.unquantized_backend.name == "CPU":
        return _get_expert_kernel(layer)._padded_intermediate_size(layer.moe_config)
    return layer.w13_weight.shape[1] // 2


def _is_known_layout(layer: VllmLayer) -> bool:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if not isinstance(layer.quant_method, UnquantizedFusedMoEMethod) or layer.is_fused_checkpoint_transposed:
        return False
    if not layer.moe_config.is_act_and_mul:
        return False
    backend = layer.quant_method.unquantized_backend.name
    if backend == "CPU":
        return not _get_expert_kernel(layer)._use_zentorch
    return backend in ("TRITON", "BATCHED_TRITON")  # others shuffle


def _get_expert_kernel(layer: VllmLayer) -> VllmLayer:
    """Return the kernel that computes with a layer's experts."""
    return layer.quant_method.moe_kernel.fused_experts


def _to_checkpoint_order(layer: VllmLayer, parameter: str) -> torch.Tensor:
    """Return a parameter in checkpoint order. Experts on a CPU are packed in another order."""
    stored = getattr(layer, parameter).detach()
    if stored.dim() != 3 or stored.device.type != "cpu" or not is_experts(layer):
        return stored
    order = _compute_packed_order(stored, _get_expert_kernel(layer).isa)
    unpacked = torch.empty_like(stored).view(len(stored), -1)
    unpacked[:, order] = stored.reshape(len(stored), -1)
    return unpacked.view(stored.shape)


def _compute_packed_order(stored: torch.Tensor, isa: str) -> torch.Tensor:
    """Compute the index in an expert's matrix of each packed number, by packing the base-256 digits of the indices
    (exact in every float format). Shape: [numbers of an expert].
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    numbers = torch.arange(stored[0].numel())
    order = torch.zeros_like(numbers)
    for shift in range(0, max(1, int(numbers[-1]).bit_length()), 8):
        digits = ((numbers >> shift) & 255).to(stored.dtype).view(1, *stored.shape[1:])
        order += cpu_prepack_moe_weight(digits, isa).view(-1).long() << shift
    return order


def _sample_rows(part: torch.Tensor, sampling: VerificationSample) -> torch.Tensor:
    """Sample a stored part: some rows of its matrices."""
    if part.dim() < 2:
        return part
    picked = sampling.of(part.shape[-2], part.numel() * part.itemsize)
    return part[..., picked, :]
