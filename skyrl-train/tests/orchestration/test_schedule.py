"""Schedule of rows: every row once, every rank the same number of forwards."""

import random
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch

from skyrl_train.models.packing import compute_prefix_order, pack_rows
from skyrl_train.orchestration.schedule import Schedule
from skyrl_train.training_batch import MicroBatch, TensorBatch, TrainingInputBatch


def counted_rows(schedule: Schedule) -> list[list[list[list[int]]]]:
    """[mini-batch][shard][micro-batch] the rows of the batch that count."""
    return [
        [
            [[int(own[row]) for row in micro.rows] for micro in micros if not micro.is_dummy]
            for own, micros in zip(schedule.rows, of_ranks, strict=True)
        ]
        for of_ranks in schedule.mini_batches
    ]


def tokens(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def test_ranks_take_consecutive_rows_without_token_budget():
    schedule = Schedule.of([5] * 8, [[0, 1, 2, 3], [4, 5, 6, 7]], 2, micro_batch_size=2)
    assert [own.tolist() for own in schedule.rows] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    first, second = (MicroBatch((0, 1)),), (MicroBatch((2, 3)),)
    assert schedule.mini_batches == [[first, first], [second, second]]
    assert schedule.merge_mini_batches() == [first + second, first + second]


def test_micro_batch_is_split_before_dummy_is_added():
    schedule = Schedule.of([5] * 9, [range(9)], 2, micro_batch_size=2)
    assert counted_rows(schedule) == [[[[0, 1], [2, 3], [4]], [[5], [6], [7, 8]]]]


def test_shard_with_too_few_rows_repeats_shortest_row_as_dummy():
    schedule = Schedule.of([5, 9, 7, 8, 2, 3, 1], [[0, 1, 2], [3, 4, 5, 6]], 2, micro_batch_size=1)
    assert [own.tolist() for own in schedule.rows] == [[0, 1, 3, 4], [2, 5, 6]]
    (_, second), _ = schedule.mini_batches
    assert second == (MicroBatch((0,)), MicroBatch((2,), is_dummy=True))  # row 6, of one token


def test_shard_without_rows_computes_copied_dummy():
    schedule = Schedule.of([5, 3], [[0, 1]], 3, micro_batch_size=1)
    assert [own.tolist() for own in schedule.rows] == [[0], [1], [1]]
    assert schedule.mini_batches[0][2] == (MicroBatch((0,), is_dummy=True),)


def test_token_budget_fills_bins_longest_first():
    lengths = [2, 7, 3, 5, 12, 1]
    schedule = Schedule.of(lengths, [range(6)], 1, micro_batch_size=1, max_tokens=10)
    assert counted_rows(schedule) == [[[[4], [1, 2], [3, 0, 5]]]]  # 12 is over the budget and alone; 7 + 3; 5 + 2 + 1


def test_token_budget_balances_shards():
    schedule = Schedule.of([6, 6, 4, 4, 2, 2], [range(6)], 2, micro_batch_size=1, max_tokens=8)
    loads = [sum(tokens(micro, [6, 6, 4, 4, 2, 2]) for micro in micros) for micros in counted_rows(schedule)[0]]
    assert loads == [12, 12]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_counts_once_and_shards_are_even(seed):
    draw = random.Random(seed)
    unit, data_parallel_size, micro_size = draw.choice([1, 1, 2]), draw.randint(1, 5), draw.randint(1, 5)
    units = [[unit * i + j for j in range(unit)] for i in range(draw.randint(1, 40))]
    lengths = [draw.randint(0, 90) for _ in range(unit * len(units))]
    max_tokens = draw.choice([None, 60, 150])
    draw.shuffle(units)  # the rows of a mini-batch need not be neighbours in the batch
    cut = draw.randint(0, len(units))
    mini_batches = [list(chain(*units[:cut])), list(chain(*units[cut:]))]
    schedule = Schedule.of(
        lengths, mini_batches, data_parallel_size, micro_batch_size=micro_size, max_tokens=max_tokens, unit=unit
    )
    for rows, of_ranks, micros in zip(mini_batches, counted_rows(schedule), schedule.mini_batches, strict=True):
        assert sorted(row for shard in of_ranks for micro in shard for row in micro) == sorted(rows)
        assert len({len(of_shard) for of_shard in micros}) == 1
        assert all(micro.rows for of_shard in micros for micro in of_shard)
        for micro in (micro for shard in of_ranks for micro in shard):
            if max_tokens is None:
                assert len(micro) <= max(unit, micro_size)
            else:
                assert len(micro) == unit or tokens(micro, lengths) <= max_tokens
            assert unit == 1 or [row + 1 for row in micro[::2]] == micro[1::2]
    positions = [[row for micro in micros for row in micro.rows] for micros in schedule.merge_mini_batches()]
    assert all(max(used) < len(own) for used, own in zip(positions, schedule.rows, strict=True))


def test_ragged_lengths_are_balanced_and_bins_are_full():
    draw = random.Random(0)
    lengths = [min(8192, int(draw.lognormvariate(6.5, 1))) for _ in range(1024)]
    schedule = Schedule.of(lengths, [range(1024)], 8, micro_batch_size=1, max_tokens=16384)
    loads = [sum(tokens(micro, lengths) for micro in micros) for micros in counted_rows(schedule)[0]]
    assert max(loads) < 1.01 * sum(loads) / len(loads)
    num_micros = sum(len(micros) for micros in schedule.mini_batches[0])
    assert num_micros <= 8 * -(-max(loads) // 16384)


def samples_of_prompts(
    groups: Sequence[tuple[int, int]], num_response: int, common: int = 0, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and mask of groups, (tokens of the prompt, samples) each, whose prompts have `common` tokens in common;
    shuffled."""
    draw = random.Random(seed)
    width = max(length for length, _ in groups)
    rows = []
    for group, (length, num_samples) in enumerate(groups):
        prompt = [*range(common), *(1000 * (group + 1) + place for place in range(length - common))]
        for _ in range(num_samples):
            response = [draw.randrange(9) for _ in range(draw.randint(1, num_response))]
            rows.append((prompt, response))
    draw.shuffle(rows)
    sequences = torch.zeros(len(rows), width + num_response, dtype=torch.long)
    mask = torch.zeros_like(sequences)
    for row, (prompt, response) in enumerate(rows):
        cells = slice(width - len(prompt), width + len(response))
        sequences[row, cells], mask[row, cells] = torch.tensor([*prompt, *response]), 1
    return sequences, mask


@pytest.mark.parametrize("common", [0, 20])
@pytest.mark.parametrize("data_parallel_size", [1, 3])
def test_shared_prompt_counts_once_in_token_budget(data_parallel_size: int, common: int):
    """The tokens that a model lays out, not those that the schedule counts, are within the budget."""
    sequences, mask = samples_of_prompts([(100, 8), (60, 8), (30, 8), (90, 1), (80, 5), (25, 2)], 20, common)
    lengths, rows, max_tokens = mask.sum(1).tolist(), range(len(mask)), 250
    mini_batches = [rows[:20], rows[20:]]
    given: dict[str, Any] = dict(micro_batch_size=1, max_tokens=max_tokens)
    order = compute_prefix_order(sequences, mask, 20)
    sharing = Schedule.of(lengths, mini_batches, data_parallel_size, prefixes=order, **given)
    apart = Schedule.of(lengths, mini_batches, data_parallel_size, **given)
    for own, of_ranks in zip(mini_batches, counted_rows(sharing), strict=True):
        assert sorted(row for shard in of_ranks for micro in shard for row in micro) == list(own)
    computed = []
    for micros in (micro for of_ranks in counted_rows(sharing) for shard in of_ranks for micro in shard):
        computed.append(pack_rows(sequences[micros], mask[micros], 20, share_prefixes=True).input_ids.numel())
        assert computed[-1] <= max_tokens
    assert sum(computed) < 0.6 * sum(lengths)
    assert len(sharing.merge_mini_batches()[0]) <= 0.7 * len(apart.merge_mini_batches()[0])


def test_ranks_get_nearly_equal_tokens_of_shared_prompts():
    sequences, mask = samples_of_prompts([(64, 8)] * 16, 32)
    order = compute_prefix_order(sequences, mask, 32)
    schedule = Schedule.of(mask.sum(1).tolist(), [range(128)], 4, micro_batch_size=1, max_tokens=400, prefixes=order)
    loads = [
        sum(pack_rows(sequences[m], mask[m], 32, share_prefixes=True).input_ids.numel() for m in micros)
        for micros in counted_rows(schedule)[0]
    ]
    assert max(loads) < 1.2 * min(loads)  # two parts of a group that is divided compute its prompt each


def test_prompts_without_common_prefix_are_packed_as_usual():
    sequences, mask = samples_of_prompts([(10 + place, 1) for place in range(40)], 20)
    lengths = mask.sum(1).tolist()
    given: dict[str, Any] = dict(micro_batch_size=1, max_tokens=100)
    sharing = Schedule.of(lengths, [range(40)], 2, prefixes=compute_prefix_order(sequences, mask, 20), **given)
    apart = Schedule.of(lengths, [range(40)], 2, **given)
    assert counted_rows(sharing) == counted_rows(apart)


@pytest.mark.parametrize("max_tokens", [None, 20])
def test_gather_restores_sharded_batch(max_tokens):
    lengths = [(row * 7) % 11 for row in range(10)]
    batch = TrainingInputBatch(sequences=torch.arange(20).view(10, 2))
    for data_parallel_size in (1, 3, 16):
        schedule = Schedule.of(
            lengths, [[9, 0, 4], [1, 2, 3, 5, 6, 7, 8]], data_parallel_size, micro_batch_size=2, max_tokens=max_tokens
        )
        outputs = [TensorBatch(output=shard.tensor("sequences")) for shard in schedule.split(batch)]
        assert torch.equal(schedule.gather(outputs, "output"), batch.tensor("sequences"))


def test_empty_mini_batch_has_only_dummies():
    schedule = Schedule.of([4, 4], [[], [0, 1]], 2, micro_batch_size=1)
    assert [[micro.is_dummy for micro in micros] for micros in schedule.mini_batches[0]] == [[True], [True]]


@pytest.mark.parametrize("mini_batches", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], []])
def test_mini_batches_must_contain_every_row_once(mini_batches):
    with pytest.raises(ValueError, match="3 rows"):
        Schedule.of([1, 1, 1], mini_batches, 1, micro_batch_size=1)


def test_incomplete_pairs_are_refused():
    with pytest.raises(ValueError, match="units of 2"):
        Schedule.of([1, 1, 1], [[0, 1, 2]], 1, micro_batch_size=1, unit=2)
