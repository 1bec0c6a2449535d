"""Data loader: batches of a dataset over epochs, with a position that can be saved and restored."""

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from skyrl_train.errors import CheckpointError, ConfigError, DataError


class Dataset(Protocol):
    """Indexable rows, with a function that collates a list of them to a batch."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...
    def collate_fn(self, items: list[Any], /) -> Any: ...


class PromptDataLoader:
    """Loader of prompt batches. Iterating yields the rest of the current epoch, or the next one if nothing is left.

    The order of an epoch depends only on the seed and the epoch number, so a resumed run sees the remaining prompts in
    the same order. The position counts a batch as soon as it is returned.

    Args:
        batch_size: prompts per batch.
        shuffle: use another order in every epoch.
        drop_last: drop an incomplete last batch.

    Raises:
        DataError: the dataset has less than one batch.
    """

    def __init__(self, dataset: Dataset, batch_size: int, shuffle: bool, drop_last: bool, seed: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1; got {batch_size}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self.batches_consumed = 0
        self._orders: dict[int, list[int]] = {}
        if len(self) == 0:
            raise DataError(
                f"the dataset has {len(dataset)} prompts, fewer than one batch of {batch_size}; lower "
                "trainer.train_batch_size, or raise trainer.max_prompt_length if it dropped prompts"
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full if self.drop_last or rest == 0 else full + 1

    @property
    def num_epochs_dealt(self) -> int:
        """Number of epochs whose last batch has been returned."""
        return self.epoch + (self.batches_consumed == len(self))

    def __iter__(self) -> Iterator[Any]:
        if self.batches_consumed == len(self):
            self._start_next_epoch()
        while self.batches_consumed < len(self):
            yield self._take_indices()

    def next_batch(self) -> Any:
        """Return the next batch; the first of the next epoch after the last of this one."""
        if self.batches_consumed == len(self):
            self._start_next_epoch()
        return self._take_indices()

    def skip_batch(self) -> None:
        """Advance the position like `next_batch`, without reading the batch."""
        if self.batches_consumed == len(self):
            self._start_next_epoch()
        self.batches_consumed += 1

    def prompt(self, place: int) -> Any:
        """Return the row at an index in the order of full batches over all epochs. The position is unchanged."""
        epoch, place = divmod(place, len(self) * self.batch_size)
        return self.dataset.collate_fn([self.dataset[self._get_order(epoch)[place]]])[0]

    def _start_next_epoch(self) -> None:
        self.epoch, self.batches_consumed = self.epoch + 1, 0

    def _take_indices(self) -> object:
        start = self.batches_consumed * self.batch_size
        self.batches_consumed += 1
        indices = self._get_order(self.epoch)[start : start + self.batch_size]
        return self.dataset.collate_fn([self.dataset[i] for i in indices])

    def _get_order(self, epoch: int) -> list[int]:
        """Return the order of an epoch; the last two are cached."""
        if epoch not in self._orders:
            self._orders = dict([*self._orders.items(), (epoch, self.order(epoch))][-2:])
        return self._orders[epoch]

    def order(self, epoch: int) -> list[int]:
        """Compute the indices of the dataset in the order of an epoch."""
        if not self.shuffle:
            return list(range(len(self.dataset)))
        digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        """Return the position: completed epochs, and returned batches of the current one."""
        return {"epoch": self.epoch, "batches_consumed": self.batches_consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a position. Raises CheckpointError if it is out of range for this dataset."""
        epoch, batches_consumed = state["epoch"], state["batches_consumed"]
        if epoch < 0 or not 0 <= batches_consumed <= len(self):
            raise CheckpointError(
                f"the saved dataloader position is batch {batches_consumed} of epoch {epoch}, but an epoch has "
                f"{len(self)} batches: the data, trainer.train_batch_size or trainer.max_prompt_length changed since "
                "the checkpoint"
            )
        self.epoch, self.batches_consumed = epoch, batches_consumed
