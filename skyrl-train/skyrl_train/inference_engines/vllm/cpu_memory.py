"""Memory of a CPU tensor given back without moving the tensor."""

import ctypes
import mmap

import torch


def release(tensor: torch.Tensor) -> int:
    """Tell Linux that the content of `tensor` is not needed: its whole pages leave memory, and read as zeros later.

    Only for private anonymous memory, which is what torch allocates.

    Returns:
        Bytes of the pages.
    """
    storage = tensor.untyped_storage()
    start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise(MADV_DONTNEED) failed")
    return end - start
