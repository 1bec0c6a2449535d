"""Release of a CPU tensor's memory without moving the tensor."""

import ctypes
import mmap

import torch


def release(tensor: torch.Tensor) -> int:
    """Release the memory of `tensor` to Linux: its full pages are freed and read as zeros later.

    Only for private anonymous memory, as allocated by torch.

    Returns:
        Size of the freed pages in bytes.
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
