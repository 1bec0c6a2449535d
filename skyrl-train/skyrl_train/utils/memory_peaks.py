"""Peak memory of phases of this process: of the device's allocator on CUDA, of its own pages on a CPU.

On a CPU the peak is that of the resident set without files and shared memory, as they are when a phase ends: code that
is loaded during training and weights on their way to engines are no memory of the model. What was freed before and
malloc keeps is given back to the system before anything is measured.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryPeaks:
    """Largest memory in each phase, above what the process held when this was made.

    Args:
        device: that the process computes on.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        if not self._is_cuda:
            trim_heap()
        self._base = self._held()
        self._peaks: dict[str, int] = {}
        self._was_taken = False

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        """Measure what runs inside as `phase`; the largest counts. Where the system does not tell, nothing is
        measured."""
        begun = self._begin()
        try:
            yield
        finally:  # the peak of what ran out of memory counts
            if begun:
                self._peaks[phase] = max(self._peaks.get(phase, 0), self._peak() - self._base)

    def take(self) -> dict[str, int]:
        """Return the peaks in bytes, and forget them."""
        taken, self._peaks, self._was_taken = self._peaks, {}, True
        return taken

    def _begin(self) -> bool:
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return True
        if not self._was_taken:  # later peaks only inform of memory that ran out, and need not cost time
            trim_heap()
        try:
            _CLEAR.write_text("5")  # VmHWM begins anew
        except OSError:  # another system than Linux, or one that forbids it
            return False
        return self._base > 0

    def _peak(self) -> int:
        if self._is_cuda:
            return torch.cuda.max_memory_allocated()
        return _status("VmHWM") - _status("RssFile") - _status("RssShmem")

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self._is_cuda else _status("RssAnon")


def trim_heap() -> None:
    """Give freed memory that malloc keeps back to the system, where it can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library than glibc
        return


def _status(name: str) -> int:
    """Return a field of this process's status in bytes; 0 where there is none."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
