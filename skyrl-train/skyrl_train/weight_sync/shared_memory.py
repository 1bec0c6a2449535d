"""Bytes through memory that the trainer owns and every process of its machine can map.

The memory is reused over all syncs (fresh pages cost more than the copy) and has no name in any file system: it is
reached through the trainer's open file, so nothing is left behind, however its processes end.
"""

import mmap
import os
import tempfile

import torch

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import Place, WeightUpdateRequest
from skyrl_train.weight_sync.payload import Payload
from skyrl_train.weight_sync.transport import Reader, Writer

NUM_SLOTS = 2
"""The engines copy out of one while the trainer fills the other."""


class Segment:
    """Growing shared memory; `name` opens it in other processes while this one lives."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            # Anonymous memory: it is not limited by the size of /dev/shm, which containers often have at 64 MiB.
            self._fd = os.memfd_create("weight_sync")
            self.name = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:  # systems other than Linux: a file, deleted when it is closed
            self._file = tempfile.NamedTemporaryFile(prefix="weight_sync_")  # noqa: SIM115
            self._fd = self._file.fileno()
            self.name = self._file.name
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def first(self, num_bytes: int) -> torch.Tensor:
        """The first bytes, after growing if there are fewer. [num_bytes] uint8"""
        if num_bytes > self._bytes.numel():
            # It only grows: a process that has the shorter mapping keeps valid pages, and maps again when it needs
            # more.
            os.ftruncate(self._fd, num_bytes)
            self._bytes = map_file(self._fd, num_bytes)
        return self._bytes[:num_bytes]

    def close(self) -> None:
        """Release the memory; it is free once no engine maps it any more."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        if hasattr(self, "_file"):
            self._file.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def map_file(fd: int, num_bytes: int) -> torch.Tensor:
    """The first bytes of an open file as a tensor that shares its memory. [num_bytes] uint8"""
    mapped = mmap.mmap(fd, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Gigabytes in pages of 4 KiB are a page fault each; advice that the kernel may ignore.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


class SharedMemoryWriter(Writer):
    """The trainer's end."""

    def __init__(self) -> None:
        self._slots = [Segment() for _ in range(NUM_SLOTS)]

    def write(self, payload: Payload, version: int, index: int) -> Place:
        """Copy a bucket to memory that no engine is reading."""
        # The sender announced bucket i - 1 only after all engines had read i - 2, whose slot this was.
        slot = self._slots[index % NUM_SLOTS]
        if payload.num_bytes:
            payload.copy_to(slot.first(payload.num_bytes))
        return {"location": slot.name}

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class SharedMemoryReader(Reader):
    """An engine's end. What it returns is the trainer's memory: copy it, never write to it.

    Args:
        source: the policy rank whose memory it is, for errors.
    """

    def __init__(self, source: int = 0) -> None:
        self._owner = f"policy rank {source}"
        self._mapped: dict[str, torch.Tensor] = {}

    def read(self, request: WeightUpdateRequest) -> torch.Tensor:
        """The bucket's bytes. [num_bytes] uint8, on the host

        Raises:
            WeightSyncError: the memory cannot be opened from here, or is shorter than announced.
        """
        if request.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Mapped once and kept: the trainer reuses its segments over all syncs.
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
