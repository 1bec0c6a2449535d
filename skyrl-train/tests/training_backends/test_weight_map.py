"""The map of weights between transformers and megatron-core, on tensors whose numbers say where they come from."""

from dataclasses import replace

import pytest
import torch

from skyrl_train.training_backends.megatron.weight_map import Entry, MapSizes, get_local_name, iter_entries

DENSE = MapSizes(num_layers=1, num_heads=4, num_key_value_heads=2, head_dim=1, num_words=5, padded_words=6)
MIXTURE = MapSizes(
    num_layers=1,
    num_heads=4,
    num_key_value_heads=2,
    head_dim=1,
    num_words=4,
    padded_words=4,
    num_experts=4,
    expert_ranks=2,
    sparse_layers=frozenset([0]),
)


def entry_of(sizes: MapSizes, tensor: str) -> Entry:
    [found] = [entry for entry in iter_entries(sizes) if tensor in entry.tensors]
    return found


def rows(*numbers: float) -> torch.Tensor:
    """A matrix of one column with these numbers."""
    return torch.tensor(numbers)[:, None]


def test_qkv_weight_orders_queries_key_value_per_head():
    entry = entry_of(DENSE, "decoder.layers.0.self_attention.linear_qkv.weight")
    q, k, v = rows(1, 2, 3, 4), rows(10, 20), rows(100, 200)
    shards = [entry.split([q, k, v], rank, 2) for rank in range(2)]
    assert [shard.flatten().tolist() for shard in shards] == [[1, 2, 10, 100], [3, 4, 20, 200]]
    assert all(torch.equal(a, b) for a, b in zip(entry.merge(shards), [q, k, v], strict=True))


def test_rank_orders_gate_rows_before_up_rows():
    entry = entry_of(DENSE, "decoder.layers.0.mlp.linear_fc1.weight")
    whole = [rows(1, 2, 3, 4), rows(10, 20, 30, 40)]
    shards = [entry.split(whole, rank, 2) for rank in range(2)]
    assert [shard.flatten().tolist() for shard in shards] == [[1, 2, 10, 20], [3, 4, 30, 40]]
    assert all(torch.equal(a, b) for a, b in zip(entry.merge(shards), whole, strict=True))


def test_vocabulary_padding_is_zero_and_removed_on_export():
    entry = entry_of(DENSE, "embedding.word_embeddings.weight")
    shards = [entry.split([rows(1, 2, 3, 4, 5)], rank, 2) for rank in range(2)]
    assert [shard.flatten().tolist() for shard in shards] == [[1, 2, 3], [4, 5, 0]]
    assert entry.merge(shards)[0].flatten().tolist() == [1, 2, 3, 4, 5]


def test_experts_are_split_in_blocks_and_sharded():
    gate_up = torch.arange(4 * 4.0).reshape(4, 4, 1)  # expert e has gates 4e, 4e + 1 and ups 4e + 2, 4e + 3
    entry = entry_of(MIXTURE, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight")
    shards = [entry.split([gate_up], rank, 4) for rank in range(4)]
    assert [shard[..., 0].tolist() for shard in shards] == [
        [[0, 2], [4, 6]],  # first half of experts 0 and 1
        [[1, 3], [5, 7]],
        [[8, 10], [12, 14]],
        [[9, 11], [13, 15]],
    ]
    assert torch.equal(entry.merge(shards)[0], gate_up)
    assert len(entry.tensors) == 2, "the experts of a rank"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sizes", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_weight_map_is_bijective(sizes: MapSizes, tied: bool, size: int):
    sizes = replace(sizes, tied_head=tied, qkv_bias=True, qk_norms=True)
    draw = torch.Generator().manual_seed(0)
    names = set()
    for entry in iter_entries(sizes):
        assert not names & set(entry.names)
        names |= set(entry.names)
        shapes = [shape_of(name, sizes) for name in entry.names]
        whole = [torch.randn(shape, generator=draw) for shape in shapes]
        ranks = 1 if entry.division == "none" else size * (sizes.expert_ranks if entry.division == "expert" else 1)
        back = entry.merge([entry.split(whole, rank, ranks) for rank in range(ranks)])
        assert all(torch.equal(a, b) for a, b in zip(whole, back, strict=True)), entry.names
    assert ("lm_head.weight" in names) is not tied


def shape_of(name: str, sizes: MapSizes) -> tuple[int, ...]:
    """Shapes of a model whose hidden size is 4, and whose feed-forward layers have 8 rows."""
    heads, groups = sizes.num_heads * sizes.head_dim, sizes.num_key_value_heads * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (sizes.num_words, 4),
        "lm_head.weight": (sizes.num_words, 4),
        "q_proj.weight": (heads, 4),
        "q_proj.bias": (heads,),
        "o_proj.weight": (4, heads),
        "gate_proj.weight": (8, 4),
        "up_proj.weight": (8, 4),
        "down_proj.weight": (4, 8),
        "mlp.gate.weight": (sizes.num_experts, 4),
        "experts.gate_up_proj": (sizes.num_experts, 16, 4),
        "experts.down_proj": (sizes.num_experts, 4, 8),
    }
    for part in "kv":
        shapes |= {f"{part}_proj.weight": (groups, 4), f"{part}_proj.bias": (groups,)}
    return next((shape for end, shape in shapes.items() if name.endswith(end)), (4,))


def test_stage_numbers_layers_from_0():
    assert get_local_name("decoder.layers.7.mlp.router.weight", 4) == "decoder.layers.3.mlp.router.weight"
    assert get_local_name("decoder.final_layernorm.weight", 4) == "decoder.final_layernorm.weight"
