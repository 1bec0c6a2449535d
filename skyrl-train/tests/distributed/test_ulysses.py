"""Ranks that share sequences compute what one would alone: attention, its gradients, and the way there and back."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from skyrl_train.distributed.ulysses import SequenceParallel, build_sequence_parallel
from skyrl_train.errors import ConfigError

NUM_TOKENS, HEAD = 8, 4


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, with fewer key-value heads than query heads."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def queries_keys_values(num_heads: int, num_kv_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    heads = (num_heads, num_kv_heads, num_kv_heads)
    return [torch.randn(2, n, NUM_TOKENS, HEAD, generator=generator, dtype=torch.float64) for n in heads]


def numbers_of_the_answer(num_heads: int) -> torch.Tensor:
    """A weight for every number of the answer, so that each one's gradient counts and differs."""
    return torch.arange(2 * num_heads * NUM_TOKENS * HEAD, dtype=torch.float64).view(2, num_heads, NUM_TOKENS, HEAD)


def attention_of_ranks(size: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
    """Compute on one rank: attention over exchanged heads, the whole answer, and the gradients of this rank's
    slices."""
    ranks = build_sequence_parallel(size)
    assert ranks is not None
    slices = [ranks.shard(x, 2).clone().requires_grad_() for x in queries_keys_values(num_heads, num_kv_heads)]
    own_heads = [ranks.to_heads(x) for x in slices]
    answer = ranks.gather(ranks.to_sequence(attention(*own_heads)), dim=2)
    (answer * numbers_of_the_answer(num_heads)).sum().backward()
    return {
        "group": dist.get_process_group_ranks(ranks.group),
        "rank": ranks.rank,
        "heads": [x.shape[1] for x in own_heads],
        "answer": answer.detach(),
        "gradients": [x.grad for x in slices],
    }


@pytest.mark.first_case
@pytest.mark.parametrize(
    "num_ranks, size, num_heads, num_kv_heads, own_heads",
    [
        (2, 2, 4, 4, [2, 2, 2]),  # every head has its own keys
        (2, 2, 4, 2, [2, 1, 1]),  # grouped queries
        (4, 4, 8, 2, [2, 1, 1]),  # fewer key-value heads than ranks: two ranks have the same one
        (4, 2, 12, 3, [6, 3, 3]),  # two groups; 3 key-value heads do not divide by 2: each is there twice
    ],
)
def test_attention_over_exchanged_heads_matches_plain_attention(
    run_on_ranks, num_ranks, size, num_heads, num_kv_heads, own_heads
):
    whole = [x.requires_grad_() for x in queries_keys_values(num_heads, num_kv_heads)]
    expected = attention(*whole)
    (expected * numbers_of_the_answer(num_heads)).sum().backward()
    results = run_on_ranks(num_ranks, attention_of_ranks, size, num_heads, num_kv_heads)
    for number, result in enumerate(results):
        first = number // size * size
        assert result["group"] == list(range(first, first + size))
        assert result["rank"] == number - first
        assert result["heads"] == own_heads
        torch.testing.assert_close(result["answer"], expected.detach(), atol=1e-9, rtol=1e-9)
    for first in range(0, num_ranks, size):
        for i, x in enumerate(whole):
            gradient = torch.cat([result["gradients"][i] for result in results[first : first + size]], dim=2)
            torch.testing.assert_close(gradient, x.grad, atol=1e-9, rtol=1e-9)


DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def run_round_trip() -> list[tuple[torch.Tensor, torch.Tensor]]:
    ranks = build_sequence_parallel(2)
    assert ranks is not None
    answers = []
    for dtype in DTYPES:
        own = ranks.shard(torch.arange(2 * 4 * 3).view(1, 2, 4, 3).to(dtype), 2)
        answers.append((ranks.to_heads(own), ranks.to_sequence(ranks.to_heads(own)) - own))
    return answers


def test_head_exchange_round_trips_in_all_dtypes(run_on_ranks):
    for rank, answers in enumerate(run_on_ranks(2, run_round_trip)):
        for dtype, (heads, difference) in zip(DTYPES, answers, strict=True):
            assert heads.dtype == dtype
            assert torch.equal(heads, (torch.arange(12) + 12 * rank).view(1, 1, 4, 3).to(dtype))
            assert not difference.any()


def shared_weight() -> tuple[float, float, float]:
    """w times [1, 2, 3, 4] and the loss 10 y_0 + y_1 + 0 y_2 + 5 y_3, on two ranks."""
    ranks = build_sequence_parallel(2)
    assert ranks is not None
    weight = torch.tensor(3.0, requires_grad=True)
    y = ranks.gather(weight * ranks.shard(torch.tensor([1.0, 2.0, 3.0, 4.0]), 0), dim=0)
    loss = (y * torch.tensor([10.0, 1.0, 0.0, 5.0])).sum()
    loss.backward()
    assert weight.grad is not None
    total = weight.grad.clone()
    dist.all_reduce(total)
    return loss.item(), weight.grad.item(), total.item()


def test_shared_weight_gradients_sum_over_ranks(run_on_ranks):
    assert run_on_ranks(2, shared_weight) == [
        (96.0, 12.0, 32.0),  # 3 (10 1 + 1 2 + 5 4); 10 1 + 1 2; and both
        (96.0, 20.0, 32.0),
    ]


class OneOfTwo(SequenceParallel):
    """Rank without its group: enough to cut slices."""

    def __init__(self) -> None:
        self.size, self.rank = 2, 1


def test_slice_is_contiguous_and_rejects_indivisible_length():
    assert OneOfTwo().shard(torch.tensor([5, 6, 7, 8]), dim=0).tolist() == [7, 8]
    with pytest.raises(ValueError, match="7 positions"):
        OneOfTwo().shard(torch.zeros(2, 7), dim=1)


def test_indivisible_heads_are_rejected():
    OneOfTwo().check_heads(6)
    with pytest.raises(ConfigError, match="attention heads, 7"):
        OneOfTwo().check_heads(7)


def test_single_rank_has_no_group_and_oversized_group_is_rejected(group_of_one):
    assert build_sequence_parallel(1) is None
    with pytest.raises(ValueError, match="got 2"):
        build_sequence_parallel(2)


@pytest.mark.gpu(2)
def test_nccl_head_exchange_matches_gloo(run_on_ranks):
    on_cpu = run_on_ranks(2, run_round_trip_on, "cpu")
    on_gpus = run_on_ranks(2, run_round_trip_on, "cuda", device="cuda")
    for expected, actual in zip(on_cpu, on_gpus, strict=True):
        assert torch.equal(actual, expected)


def run_round_trip_on(device: str) -> torch.Tensor:
    ranks = build_sequence_parallel(2)
    assert ranks is not None
    x = torch.arange(24.0, device=device, dtype=torch.bfloat16).view(1, 2, 4, 3)
    return ranks.gather(ranks.to_sequence(ranks.to_heads(ranks.shard(x, 2)) + 1), dim=2).cpu()
