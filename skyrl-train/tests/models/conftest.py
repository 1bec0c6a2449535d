"""Ragged batches with garbage in their padding, and a look at the largest tensor that a computation makes."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WORDS, NUM_PROMPT, NUM_RESPONSE = 64, 6, 7


class Batch(NamedTuple):
    """Sequences [B, T], their mask, and the number of response columns: the arguments of a forward."""

    sequences: torch.Tensor
    mask: torch.Tensor
    num_response: int = NUM_RESPONSE

    def rows(self, rows: list[int]) -> "Batch":
        return Batch(self.sequences[rows], self.mask[rows])


@pytest.fixture
def make_batch() -> Callable[[list[tuple[int, int]]], Batch]:
    """A batch of rows with so many prompt and response tokens of 64 words. What stands at padding is no word."""

    def make(lengths: list[tuple[int, int]]) -> Batch:
        prompts, responses = torch.tensor(lengths).unsqueeze(-1).unbind(1)
        columns = torch.arange(NUM_PROMPT + NUM_RESPONSE)
        mask = ((columns >= NUM_PROMPT - prompts) & (columns < NUM_PROMPT + responses)).long()
        sequences = torch.randint(WORDS, mask.shape, generator=torch.Generator().manual_seed(0))
        return Batch(torch.where(mask == 1, sequences, -(10**9)), mask)

    return make


@pytest.fixture
def ragged(make_batch: Callable[[list[tuple[int, int]]], Batch]) -> Batch:
    """Rows that are whole, ragged, of one token each, without a response."""
    return make_batch([(6, 7), (3, 5), (1, 1), (4, 0), (5, 4), (2, 7)])


class LargestTensor(TorchDispatchMode):
    """Recorder of the number of elements of the largest tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.fixture
def watch_tensors() -> type[LargestTensor]:
    return LargestTensor
