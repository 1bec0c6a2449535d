"""The order of batches, and taking it up again."""

import subprocess
import sys

import pytest

from skyrl_train.dataset.dataloader import PromptDataLoader
from skyrl_train.errors import CheckpointError, DataError


class Numbers:
    """n rows that are their own index."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index

    def collate_fn(self, items: list[int]) -> list[int]:
        return items


def loader(n=10, batch_size=3, shuffle=True, drop_last=True, seed=42) -> PromptDataLoader:
    return PromptDataLoader(Numbers(n), batch_size, shuffle, drop_last, seed)


@pytest.mark.parametrize("drop_last, lengths", [(True, [3, 3, 3]), (False, [3, 3, 3, 1])])
def test_epoch_contains_each_row_once(drop_last, lengths):
    batches = loader(drop_last=drop_last)
    dealt = list(batches)
    assert [len(batch) for batch in dealt] == lengths and len(batches) == len(lengths)
    rows = [row for batch in dealt for row in batch]
    assert len(set(rows)) == len(rows)


def test_unshuffled_order_matches_rows():
    assert list(loader(shuffle=False, drop_last=False)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_order_differs_by_epoch_and_seed():
    batches = loader(n=100)
    assert batches.order(0) != batches.order(1) != loader(n=100, seed=43).order(1)
    first, second = list(batches), list(batches)
    assert first != second and batches.epoch == 1


@pytest.mark.parametrize("dealt", range(8))
def test_resumed_run_reads_remaining_rows(dealt):
    """8 batches are 2 epochs and two thirds."""
    uninterrupted = [loader_.next_batch() for loader_ in [loader()] for _ in range(8)]
    killed = loader()
    seen = [killed.next_batch() for _ in range(dealt)]
    resumed = loader()
    resumed.load_state_dict(killed.state_dict())
    assert seen + [resumed.next_batch() for _ in range(8 - dealt)] == uninterrupted


def test_iteration_finishes_epoch_before_next():
    batches = loader(shuffle=False)
    batches.next_batch()
    assert list(batches) == [[3, 4, 5], [6, 7, 8]]
    assert batches.state_dict() == {"epoch": 0, "batches_consumed": 3}
    assert list(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches.state_dict() == {"epoch": 1, "batches_consumed": 3}


@pytest.mark.slow
def test_order_is_equal_across_processes():
    code = (
        "from skyrl_train.dataset.dataloader import PromptDataLoader\n"
        "class D(list):\n  def collate_fn(self, items): return items\n"
        "print(PromptDataLoader(D(range(10)), 3, True, True, 42).order(5))"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert elsewhere.stdout.strip() == str(loader().order(5))


def test_out_of_range_position_is_rejected():
    with pytest.raises(CheckpointError, match="batch 4 of epoch 0"):
        loader().load_state_dict({"epoch": 0, "batches_consumed": 4})


def test_fewer_rows_than_batch_size_is_rejected():
    with pytest.raises(DataError, match=r"trainer\.train_batch_size"):
        loader(n=2)
