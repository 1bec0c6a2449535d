"""Peak memory of phases of this process: of the device's allocator on CUDA, of its resident pages on a CPU.

On a CPU the peak excludes files and shared memory, measured at the end of a phase: code loaded during training and
weights being sent to engines are not model memory. Freed memory kept by malloc is returned to the system before
measuring.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryPeaks:
    """Peak memory of each phase, relative to the memory at construction.

    Args:
        device: device that the process computes on.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        if not self._is_cuda:
            release_heap()
        self._base = self._measure_allocated()
        self._peaks: dict[str, int] = {}
        self._was_taken = False

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Measure the enclosed block as `phase`; the largest value counts. Nothing is measured if the system does not
        support it."""
        begun = self._start()
        try:
            yield
        finally:  # the peak also counts if the block ran out of memory
            if begun:
                self._peaks[phase] = max(self._peaks.get(phase, 0), self._measure_peak() - self._base)

    def reset(self) -> dict[str, int]:
        """Return the peaks in bytes, and reset them."""
        taken, self._peaks, self._was_taken = self._peaks, {}, True
        return taken

    def _start(self) -> bool:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return True
        if not self._was_taken:  # later peaks are only needed if memory runs out, and need not cost time
            release_heap()
        try:
            _CLEAR.write_text("5")  # resets VmHWM
        except OSError:  # another system than Linux, or without permission
            return False
        return self._base > 0

    def _measure_peak(self) -> int:
        if self._is_cuda:
            return torch.cuda.max_memory_allocated()
        return _read_status("VmHWM") - _read_status("RssFile") - _read_status("RssShmem")

    def _measure_allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._is_cuda else _read_status("RssAnon")


def release_heap() -> None:
    """Return freed memory kept by malloc to the system, if supported."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library than glibc
        return


def _read_status(name: str) -> int:
    """Return a field of this process's status in bytes; 0 if it is missing."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
