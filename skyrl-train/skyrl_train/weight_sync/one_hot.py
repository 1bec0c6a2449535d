"""Reading of a matrix that only supports products: a product with one-hot rows selects its columns.

Exact in every float format: each number is a product with 1, summed with products with 0.
"""

from collections.abc import Callable

import torch

_ELEMENTS_AT_ONCE = 1 << 24
"""Most numbers of one-hot rows, and of their products, in memory."""
_LEAST_CHUNK = 16


def columns_by_products(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, int],
    columns: slice,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Compute columns of a matrix W as rows, [columns, outputs].

    Args:
        multiply: function x -> x W^T.
        shape: shape of W (outputs, inputs).
    """
    rows, width = shape
    chunks = []
    for picked in torch.arange(width)[columns].split(max(_LEAST_CHUNK, _ELEMENTS_AT_ONCE // max(shape))):
        one_hot = torch.zeros(len(picked), width, dtype=dtype, device=device)
        one_hot[torch.arange(len(picked)), picked] = 1
        chunks.append(multiply(one_hot))
    return as_computed(torch.cat(chunks)) if chunks else torch.empty(0, rows, dtype=dtype, device=device)


def as_computed(values: torch.Tensor) -> torch.Tensor:
    """Return the values as computed by a product: without signed zeros and subnormal numbers."""
    # GPU kernels may flush subnormal numbers to zero, and -0 + 0 is 0: neither is a weight error.
    return values.masked_fill(values.abs() < torch.finfo(values.dtype).tiny, 0.0)
