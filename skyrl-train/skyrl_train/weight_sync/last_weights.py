"""File with the weights that were sent last, the base of delta encoding. Trainer and engine each keep one.

The file is unlinked, so nothing remains after the process exits. Its memory is reclaimable page cache: a process never
holds a model twice. (Mapping the file costs twice as much as reading and writing it, since nearly every page of it
changes in every version.)
"""

import os
import tempfile
from pathlib import Path

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.payload import num_bytes_of

_Kind = tuple[str, tuple[int, ...]]  # dtype, shape


class LastWeights:
    """Named tensors in a file in `directory`.

    Raises:
        WeightSyncError: the directory cannot be written to, or is full.
    """

    def __init__(self, directory: str):
        self.version: int | None = None
        """Version of all tensors; None while some are newer than others."""
        self._directory = directory
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._make_error(error) from error
        self._end = 0
        self._places: dict[str, tuple[int, _Kind]] = {}

    def knows(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Check whether a tensor with this name, dtype and shape is stored."""
        return name in self._places and self._places[name][1] == (dtype, shape)

    def num_bytes(self, name: str) -> int:
        return num_bytes_of(*self._places[name][1])

    def read(self, name: str, into: torch.Tensor) -> None:
        """Read a stored tensor's bytes into `into` [num_bytes] uint8 on the host."""
        position, _ = self._places[name]
        rest = into.numpy().data
        while rest:
            count = os.preadv(self._file.fileno(), [rest], position)
            if count == 0:
                raise WeightSyncError(f"the last weights kept in {self._directory} end before {name!r} does")
            position, rest = position + count, rest[count:]

    def write(self, name: str, dtype: str, shape: tuple[int, ...], flat: torch.Tensor) -> None:
        """Store a tensor, given as bytes on the host, replacing the tensor with this name."""
        if not self.knows(name, dtype, shape):
            self._places[name] = self._end, (dtype, shape)
            self._end += flat.numel()
        position, _ = self._places[name]
        rest = flat.numpy().data
        try:
            while rest:
                count = os.pwrite(self._file.fileno(), rest, position)
                position, rest = position + count, rest[count:]
        except OSError as error:
            raise self._make_error(error) from error

    def close(self) -> None:
        self._file.close()

    def _make_error(self, error: OSError) -> WeightSyncError:
        return WeightSyncError(
            f"the last weights cannot be kept in {self._directory} (generator.weight_sync_directory): {error}"
        )
