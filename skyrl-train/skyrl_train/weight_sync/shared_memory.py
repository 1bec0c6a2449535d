"""Shared-memory transport: memory owned by the trainer, which every process of its machine can map.

The memory is reused for all syncs (new pages cost more than the copy) and has no name in any file system: it is
accessed through the trainer's open file, so nothing remains after its processes exit.
"""

import mmap
import os
import tempfile

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import BytesLocation, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Payload
from skyrl_train.weight_sync.transport import Reader, Writer

NUM_SLOTS = 2
"""The engines copy out of one while the trainer fills the other."""


class Segment:
    """Growing shared memory; other processes open it by `name` while this process lives."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            # Anonymous memory: not limited by the size of /dev/shm, often 64 MiB in containers.
            self._fd = os.memfd_create("weight_sync")
            self.name = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:  # systems other than Linux: a file, deleted when closed
            self._file = tempfile.NamedTemporaryFile(prefix="weight_sync_")  # noqa: SIM115
            self._fd = self._file.fileno()
            self.name = self._file.name
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def first(self, num_bytes: int) -> torch.Tensor:
        """Return the first bytes [num_bytes] uint8, growing the segment if necessary."""
        if num_bytes > self._bytes.numel():
            # It only grows: shorter mappings in other processes remain valid, and are renewed when more is needed.
            os.ftruncate(self._fd, num_bytes)
            self._bytes = map_file(self._fd, num_bytes)
        return self._bytes[:num_bytes]

    def close(self) -> None:
        """Release the memory; it is freed when no engine maps it."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if hasattr(self, "_file"):
            self._file.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def map_file(fd: int, num_bytes: int) -> torch.Tensor:
    """Map the first bytes of an open file as a tensor [num_bytes] uint8."""
    mapped = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Avoids a page fault per 4 KiB; the kernel may ignore this advice.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class SharedMemoryWriter(Writer):
    """Trainer side of the shared-memory transport."""

    def __init__(self) -> None:
        self._slots = [Segment() for _ in range(NUM_SLOTS)]

    def write(self, payload: Payload, version: int, index: int) -> BytesLocation:
        """Copy a bucket to memory that no engine is reading."""
        # The sender announced bucket i - 1 only after all engines had read i - 2, which used this slot.
        slot = self._slots[index % NUM_SLOTS]
        if payload.num_bytes:
            payload.copy_to(slot.first(payload.num_bytes))
        return {"location": slot.name}

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class SharedMemoryReader(Reader):
    """Engine side of the shared-memory transport. The result is the trainer's memory: copy it, never write to it.

    Args:
        source: the policy rank that owns the memory, for errors.
    """

    def __init__(self, source: int = 0) -> None:
        self._owner = f"policy rank {source}"
        self._mapped: dict[str, torch.Tensor] = {}

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """Return the bucket's bytes [num_bytes] uint8, on the host.

        Raises:
            WeightSyncError: this process cannot open the memory, or it is shorter than declared.
        """
        if request.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Mapped once and kept, since the trainer reuses its segments for all syncs.
        mapped = self._mapped.get(request.location)
        if mapped is None or mapped.numel() < request.num_bytes:
            self._mapped.pop(request.location, None)
            mapped = self._mapped[request.location] = _open(request, self._owner)
        return mapped[: request.num_bytes]

    def close(self) -> None:
        self._mapped.clear()


def _open(request: WeightUpdateRequest, owner: str) -> torch.Tensor:
    try:
        fd = os.open(request.location, os.O_RDWR)
    except OSError as error:
        raise WeightSyncError(
            f"the shared memory of {owner}, {request.location}, cannot be opened here ({error.strerror}): it has "
            "ended, or runs on another machine, in another container or as another user "
            "(generator.weight_sync_strategy=broadcast reaches engines there)"
        ) from error
    try:
        num_bytes = os.fstat(fd).st_size
        if num_bytes < request.num_bytes:
            raise WeightSyncError(
                f"the shared memory of {owner}, {request.location}, has {num_bytes} bytes, but bucket "
                f"{request.index} of version {request.version} announces {request.num_bytes}"
            )
        return map_file(fd, num_bytes)
    finally:
        os.close(fd)
