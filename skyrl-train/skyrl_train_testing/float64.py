"""A function run in float64 throughout, whatever it casts to inside."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")


def in_float64(function: Callable[[], Result]) -> Result:
    """`function()` with every floating-point tensor it makes or casts in float64: `x.float()` and `x.bfloat16()` then
    lose nothing. Its inputs should be float64 already."""
    with _Float64():
        return function()


class _Float64(TorchDispatchMode):
    """Dispatch mode that replaces every requested floating-point type by float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        dtype = kwargs.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
