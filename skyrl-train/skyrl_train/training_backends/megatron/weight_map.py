"""Map between the weights of a transformers model and the shards of megatron-core: pure functions of tensors.

An `Entry` maps one or more unsharded weights of transformers to one tensor of megatron-core per rank of the sharding
group. Names in megatron-core number layers and experts over the whole model; `get_local_name` converts to a rank's
numbering.

Shapes: H hidden size, I rows of a feed-forward layer, Q query heads, G key-value heads, D size of a head, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Division = Literal["none", "tensor", "expert"]
"""Group whose ranks hold different shards: none (each holds the whole), tensor parallel, expert (and expert-tensor)
parallel."""

Split = Callable[[Sequence[torch.Tensor], int, int], torch.Tensor]
"""(whole weights of transformers, rank, ranks) -> the shard of that rank."""

Merge = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Shards of all ranks, in order -> whole weights of transformers."""


@dataclass(frozen=True)
class MapSizes:
    """Sizes that the map depends on."""

    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    num_words: int
    padded_words: int
    """Rows of the embedding with padding."""

    expert_ranks: int = 1
    """Expert-parallel size."""

    num_experts: int = 0
    sparse_layers: frozenset[int] = frozenset()
    """Layers whose feed-forward block is a mixture of experts."""

    tied_head: bool = False
    qkv_bias: bool = False
    qk_norms: bool = False
    value_head: str | None = None
    """Name of a critic's head, which replaces the output layer; None: not a critic."""


@dataclass(frozen=True)
class Entry:
    """Mapping of weights."""

    names: tuple[str, ...]
    """Names in transformers."""

    tensors: tuple[str, ...]
    """Names in megatron-core, with global layer numbers; several for the experts of a layer, numbered on the rank."""

    split: Split
    merge: Merge
    division: Division = "none"
    layer: int | None = None
    """None: embedding or output."""

    is_output: bool = False
    """Belongs to the last pipeline stage, if not to a layer."""

    stacked: bool = False
    """The shard is the stack of several tensors."""

    @property
    def is_router(self) -> bool:
        """Whether the weight belongs to a router."""
        return self.tensors[0].endswith(".mlp.router.weight")


def iter_entries(sizes: MapSizes) -> Iterator[Entry]:
    """Yield all entries, in the order of the model."""
    if sizes.value_head is None:
        yield from _iter_language_model(sizes)
        return
    for entry in _iter_language_model(replace(sizes, tied_head=True)):
        # transformers names the parts of a model without an output layer relative to its inner module.
        yield replace(entry, names=tuple(name.removeprefix("model.") for name in entry.names))
    yield _build_replicated(f"{sizes.value_head}.weight", "value_head.weight", is_output=True)


def _iter_language_model(sizes: MapSizes) -> Iterator[Entry]:
    words = _Rows(sizes.num_words, sizes.padded_words)
    yield Entry(
        ("model.embed_tokens.weight",),
        ("embedding.word_embeddings.weight",),
        words.split,
        words.merge,
        "tensor",
    )
    for layer in range(sizes.num_layers):
        yield from _iter_attention(sizes, layer)
        yield from _iter_sparse_mlp(sizes, layer) if layer in sizes.sparse_layers else _iter_dense_mlp(layer)
    yield _build_replicated("model.norm.weight", "decoder.final_layernorm.weight", is_output=True)
    if not sizes.tied_head:
        yield Entry(("lm_head.weight",), ("output_layer.weight",), words.split, words.merge, "tensor", is_output=True)


def _iter_attention(sizes: MapSizes, layer: int) -> Iterator[Entry]:
    theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
    yield _build_replicated(f"{theirs}.input_layernorm.weight", f"{ours}.input_layernorm.weight", layer=layer)
    heads = _HeadGroups(sizes.num_heads, sizes.num_key_value_heads, sizes.head_dim)
    for kind in ("weight", "bias") if sizes.qkv_bias else ("weight",):
        names = tuple(f"{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
        tensor = f"{ours}.self_attention.linear_qkv.{kind}"
        yield Entry(names, (tensor,), heads.split, heads.merge, "tensor", layer)
    if sizes.qk_norms:
        for part in "qk":
            tensor = f"{ours}.self_attention.{part}_layernorm.weight"
            yield _build_replicated(f"{theirs}.self_attn.{part}_norm.weight", tensor, layer=layer)
    tensor = f"{ours}.self_attention.linear_proj.weight"
    yield Entry((f"{theirs}.self_attn.o_proj.weight",), (tensor,), split_columns, merge_columns, "tensor", layer)


def _iter_dense_mlp(layer: int) -> Iterator[Entry]:
    theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
    yield _build_replicated(
        f"{theirs}.post_attention_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight", layer=layer
    )
    names = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
    yield Entry(names, (f"{ours}.mlp.linear_fc1.weight",), split_gate_up, merge_gate_up, "tensor", layer)
    name, tensor = f"{theirs}.mlp.down_proj.weight", f"{ours}.mlp.linear_fc2.weight"
    yield Entry((name,), (tensor,), split_columns, merge_columns, "tensor", layer)


def _iter_sparse_mlp(sizes: MapSizes, layer: int) -> Iterator[Entry]:
    theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
    yield _build_replicated(
        f"{theirs}.post_attention_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight", layer=layer
    )
    yield _build_replicated(f"{theirs}.mlp.gate.weight", f"{ours}.mlp.router.weight", layer=layer)
    deal = _Experts(sizes.expert_ranks)
    for name, part, split, merge in (
        ("gate_up_proj", "linear_fc1", deal.split_gate_up, deal.merge_gate_up),
        ("down_proj", "linear_fc2", deal.split_down, deal.merge_down),
    ):
        tensors = tuple(
            f"{ours}.mlp.experts.local_experts.{expert}.{part}.weight"
            for expert in range(sizes.num_experts // sizes.expert_ranks)
        )
        yield Entry((f"{theirs}.mlp.experts.{name}",), tensors, split, merge, "expert", layer, stacked=True)


def _build_replicated(name: str, tensor: str, *, layer: int | None = None, is_output: bool = False) -> Entry:
    return Entry(
        (name,),
        (tensor,),
        lambda whole, rank, size: whole[0],
        lambda shards: [shards[0]],
        layer=layer,
        is_output=is_output,
    )


def get_local_name(tensor: str, first_layer: int) -> str:
    """Return the name of a tensor on the pipeline stage that starts at layer `first_layer`."""
    parts = tensor.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) - first_layer)
    return ".".join(parts)


# ---- divisions of one tensor


@dataclass(frozen=True)
class _Rows:
    """Vocabulary rows, with padding at the end that transformers does not have."""

    num_words: int
    padded: int

    def split(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        [weight] = whole
        padding = weight.new_zeros(self.padded - self.num_words, *weight.shape[1:])
        return torch.cat([weight, padding]).chunk(size)[rank]

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: self.num_words]]


def split_columns(whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """[rows, columns] -> [rows, columns / ranks]."""
    return whole[0].chunk(size, dim=1)[rank]


def merge_columns(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inverse of `split_columns`."""
    return [torch.cat(list(shards), dim=1)]


def split_gate_up(whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """Gate and up, [I, H] each -> [2 I / ranks, H]: the gate rows of the rank, then its up rows."""
    return torch.cat([part.chunk(size)[rank] for part in whole])


def merge_gate_up(shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inverse of `split_gate_up`."""
    gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return [torch.cat(gates), torch.cat(ups)]


@dataclass(frozen=True)
class _HeadGroups:
    """Rows of q, k and v: for each key-value head its query heads, then its k rows, then its v rows."""

    num_heads: int
    num_groups: int
    head_dim: int

    def split(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        # [Q D, H], [G D, H], [G D, H] -> [G, (Q / G + 2) D, H] -> the groups of the rank
        groups = torch.cat([part.unflatten(0, (self.num_groups, -1)) for part in whole], dim=1)
        return groups.chunk(size)[rank].flatten(0, 1)

    def merge(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        groups = torch.cat(list(shards)).unflatten(0, (self.num_groups, -1))
        num_queries = self.num_heads // self.num_groups * self.head_dim
        parts = groups.split([num_queries, self.head_dim, self.head_dim], dim=1)
        return [part.flatten(0, 1) for part in parts]


@dataclass(frozen=True)
class _Experts:
    """Experts distributed to `expert_ranks` ranks in consecutive blocks; each sharded over the ranks of expert-tensor
    parallelism, which are the inner ones: rank = expert rank x (ranks / expert ranks) + tensor rank."""

    expert_ranks: int

    def split_gate_up(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[E, 2 I, H] -> [E / expert ranks, 2 I / tensor ranks, H]."""
        own, place, inner = self._select_own(whole[0], rank, size)
        gate, up = own.chunk(2, dim=1)
        return torch.cat([gate.chunk(inner, dim=1)[place], up.chunk(inner, dim=1)[place]], dim=1)

    def merge_gate_up(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        def gather_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            gates, ups = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
            return torch.cat([*gates, *ups], dim=1)

        return [torch.cat([gather_parts(parts) for parts in self._group_by_expert_rank(shards)])]

    def split_down(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """[E, H, I] -> [E / expert ranks, H, I / tensor ranks]."""
        own, place, inner = self._select_own(whole[0], rank, size)
        return own.chunk(inner, dim=2)[place]

    def merge_down(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([torch.cat(list(parts), dim=2) for parts in self._group_by_expert_rank(shards)])]

    def _select_own(self, whole: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, int, int]:
        inner = size // self.expert_ranks
        return whole.chunk(self.expert_ranks)[rank // inner], rank % inner, inner

    def _group_by_expert_rank(self, shards: Sequence[torch.Tensor]) -> Iterator[Sequence[torch.Tensor]]:
        inner = len(shards) // self.expert_ranks
        return (shards[start : start + inner] for start in range(0, len(shards), inner))
