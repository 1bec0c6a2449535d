"""Arithmetic of this process on a CPU: one thread, and matrix products whose rows do not depend on other rows."""

import os

import torch
import torch.nn.functional as F
from loguru import logger

_STRICT = {"AVX512": "AVX512,STRICT", "AVX2": "AVX2,STRICT"}
_PROBED = (4, 5, 8, 17, 64)


def prepare_cpu() -> None:
    """Use one thread unless OMP_NUM_THREADS is set, and strict kernels. Call it in each computing thread: OpenMP counts
    threads for each."""
    # Two threads of one process compete for two cores; two processes of one thread do not.
    threads = os.environ.get("OMP_NUM_THREADS") or "1"  # "4,2": threads of nested regions follow
    torch.set_num_threads(int(threads.partition(",")[0]))
    set_strict_kernels()


def set_strict_kernels() -> None:
    """Make MKL use its strict kernels unless MKL_CBWR is set. Call it before the first matrix product of the process,
    when MKL reads the variable.

    Otherwise MKL chooses a kernel by the number of rows, on some processors even for small numbers (seen on Intel's
    with AVX-512): the bits of a row then depend on the batch size. A value that the processor does not support has no
    effect.
    """
    strict = _STRICT.get(torch.backends.cpu.get_cpu_capability())
    if strict and torch.backends.mkl.is_available():
        os.environ.setdefault("MKL_CBWR", strict)


def warn_if_rows_depend_on_their_number() -> bool:
    """Compare rows of float32 products of several sizes, and log a warning if their bits depend on the number of rows.
    Returns whether they do."""
    draw, strict = torch.Generator().manual_seed(0), _STRICT.get(torch.backends.cpu.get_cpu_capability(), "AUTO,STRICT")
    for width in (128, 512):
        x = torch.randn(max(_PROBED), width, generator=draw)
        weight = torch.randn(width, width, generator=draw)
        first, *others = (F.linear(x[:rows], weight)[: _PROBED[0]] for rows in _PROBED)
        if not all(torch.equal(first, other) for other in others):
            logger.warning(
                "float32 results depend on the batch size in this process, so a resumed run may differ from an "
                "uninterrupted one: MKL was initialized before strict kernels could be selected. Set "
                f"MKL_CBWR={strict} before Python starts"
            )
            return True
    return False
