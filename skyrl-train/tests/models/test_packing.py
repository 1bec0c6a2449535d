"""Rows end to end: where every token goes, and the way back."""

import pytest
import torch

from skyrl_train.models.packing import PackedRows, pack_rows, pad_rows, trim_padding

SEQUENCES = torch.tensor([[0, 11, 12, 13], [21, 22, 23, 24], [0, 31, 0, 0]])
MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]])
"""Prompts of 1, 2 and 1 tokens, responses of 2, 2 and 0."""


def test_rows_are_packed_longest_first():
    layout = pack_rows(SEQUENCES, MASK, 2)
    assert layout.input_ids.tolist() == [[21, 22, 23, 24, 11, 12, 13, 31]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert layout.rows is not None
    assert layout.rows.lengths == (4, 3, 1)
    assert layout.rows.boundaries.tolist() == [0, 4, 7, 8]
    assert layout.real.all()


def test_token_is_predicted_by_previous_token_of_row():
    layout = pack_rows(SEQUENCES, MASK, 2)
    assert layout.labels.tolist() == [23, 24, 12, 13]
    assert layout.input_ids[0, layout.predictors].tolist() == [22, 23, 11, 12]


@pytest.mark.parametrize("lay_out", [pack_rows, pad_rows])
def test_unpacked_values_match_tokens(lay_out):
    layout = lay_out(SEQUENCES, MASK, 2)
    assert layout.scatter_scored(layout.labels.float()).tolist() == [[12, 13], [23, 24], [0, 0]]


def test_hidden_states_are_indexed_and_receive_gradients():
    layout = pack_rows(SEQUENCES, MASK, 2)
    hidden = torch.arange(8.0).view(1, 8, 1).requires_grad_()
    states, labels = layout.select_scored(hidden)
    assert states[:, 0].tolist() == [1, 2, 4, 5]
    assert labels.tolist() == [23, 24, 12, 13]
    states.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [0, 1, 1, 0, 1, 1, 0, 0]


def test_empty_row_uses_no_space():
    layout = pack_rows(SEQUENCES, MASK * torch.tensor([[1], [0], [1]]), 2)
    assert layout.input_ids.tolist() == [[11, 12, 13, 31]]
    assert layout.scatter_scored(layout.labels.float()).tolist() == [[12, 13], [0, 0], [0, 0]]


def test_empty_batch_becomes_single_padding_token():
    layout = pack_rows(SEQUENCES, torch.zeros_like(MASK), 2)
    assert (layout.input_ids.tolist(), layout.real.tolist(), len(layout.labels)) == ([[0]], [False], 0)


class TwoRanks:
    """Part of `SequenceParallel` that `packed` uses, for the second of two ranks."""

    size, rank = 2, 1

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(2, dim)[1]


def test_sequence_parallel_slices_are_padded_to_equal_length():
    mask = MASK.clone()
    mask[2] = 0
    layout = pack_rows(SEQUENCES, mask, 2, TwoRanks())  # pyright: ignore[reportArgumentType]
    # 21 22 23 24 | 11 12 13 and one token of filler
    assert layout.input_ids.tolist() == [[11, 12, 13, 0]]
    assert layout.position_ids.tolist() == [[0, 1, 2, 0]]
    assert layout.real.tolist() == [True, True, True, False]
    assert layout.rows is not None
    assert layout.rows.lengths == (4, 3, 1)
    states, labels = layout.select_scored(torch.tensor([[[4.0], [5.0], [6.0], [7.0]]]))
    assert (states[:, 0].tolist(), labels.tolist()) == ([4, 5], [12, 13])


@pytest.mark.parametrize(
    "lengths, groups",
    [
        ((5, 5, 5), [(0, (5, 5, 5))]),
        ((10, 9, 8, 7), [(0, (10, 9, 8)), (27, (7,))]),  # 7 would leave 3 of 10 places empty
        ((100, 1), [(0, (100,)), (100, (1,))]),
        ((2, 3), [(0, (2,)), (2, (3,))]),  # filler may be longer than the row before it
    ],
)
def test_rows_of_similar_length_are_grouped(lengths, groups):
    assert [(group.start, group.lengths) for group in PackedRows(lengths, torch.empty(0)).groups] == groups


def test_padding_only_columns_are_skipped():
    sequences = torch.tensor([[0, 0, 1, 2, 3, 0, 0], [0, 4, 5, 6, 0, 0, 0]])
    narrow, mask, num_response = trim_padding(sequences, (sequences != 0).long(), 3)
    assert num_response == 1
    assert narrow.tolist() == [[0, 1, 2, 3], [4, 5, 6, 0]]
    assert mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]
