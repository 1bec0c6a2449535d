"""The weights that were sent last, in a file: what the next ones are compared with. Both ends keep one.

The file has no name, so nothing is left behind, however the process ends. A tensor is mapped only while it is used: the
system may take its memory back at any time, and a model is never in memory twice.
"""

import mmap
import tempfile
from pathlib import Path

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.payload import num_bytes_of

_Kind = tuple[str, tuple[int, ...]]  # dtype, shape


class LastWeights:
    """Named tensors in a file of `directory`.

    Raises:
        WeightSyncError: the directory cannot be written to.
    """

    def __init__(self, directory: str):
        self.version: int | None = None
        """What all tensors together are; None while some are newer than others."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)
        except OSError as error:
            raise WeightSyncError(
                f"the last weights cannot be kept in {directory} (generator.weight_sync_directory): {error}"
            ) from error
        self._end = 0
        self._places: dict[str, tuple[int, _Kind]] = {}

    def knows(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this name, dtype and shape was kept."""
        return name in self._places and self._places[name][1] == (dtype, shape)

    def keep(self, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for a tensor; what is written to it stays. [num_bytes] uint8"""
        if not self.knows(name, dtype, shape):
            num_bytes = num_bytes_of(dtype, shape)
            self._places[name] = self._end, (dtype, shape)
            self._end += -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            try:
                self._file.truncate(self._end)
            except OSError as error:
                raise WeightSyncError(
                    f"generator.weight_sync_directory has no room for the last weights: {error}"
                ) from error
        return self.bytes_of(name)

    def bytes_of(self, name: str) -> torch.Tensor:
        """A kept tensor's bytes, mapped while the result is in use. [num_bytes] uint8"""
        start, kind = self._places[name]
        num_bytes = num_bytes_of(*kind)
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        mapped = mmap.mmap(self._file.fileno(), num_bytes, flags, offset=start)
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def close(self) -> None:
        self._file.close()
