"""Linear layers that compute float32 on a CPU with oneDNN, forward and backward.

torch uses its BLAS for float32 matrix products on a CPU, but oneDNN for bfloat16. The BLAS of its x86 builds (MKL) is
slow on some processors: on an AMD EPYC with AVX-512, one thread, [3072, 256] x [256, 768], it reaches 84 GFLOP/s
forward and 86 forward and backward, oneDNN 190 and 139.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def enable_onednn_linear(model: nn.Module) -> None:
    """Make the linear layers of a model compute float32 on a CPU with oneDNN, in place, if this torch supports it.
    Parameters, names and results (up to rounding) do not change; on other devices (a model kept on the CPU may visit a
    GPU layer by layer) and in other dtypes the layers compute as before."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


def disable_onednn_linear(model: nn.Module) -> None:
    """Undo `enable_onednn_linear`, for torch.compile, which cannot compile that operator."""
    for module in model.modules():
        if type(module) is OneDnnLinear:
            module.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]  # its base


class OneDnnLinear(nn.Linear):
    """y = x W^T + b."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not _is_for_onednn(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        product: torch.Tensor = _Product.apply(input, self.weight)  # type: ignore[assignment]
        return product if self.bias is None else product + self.bias


def multiply_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a b^T of a [N, K] and b [M, K] with the fastest available kernel. Without gradient."""
    return _multiply_transposed(a, b) if _is_for_onednn(a, b) else a @ b.t()


def _is_for_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    is_float32 = a.dtype == b.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_float32 and a.device.type == "cpu" and torch.backends.mkldnn.is_available()


class _Product(torch.autograd.Function):
    """x W^T of x [..., K] and W [N, K], and its gradients: dx = dy W, dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _multiply_transposed(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        return (
            _multiply_transposed(grad, weight.t()) if of_x else None,
            _compute_weight_gradient(grad.flatten(0, -2), x.flatten(0, -2)) if of_weight else None,
        )


def _compute_weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Compute dy^T x of dy [tokens, N] and x [tokens, K]. With N > K and many tokens it is computed as the transpose of
    x^T dy: the kernel transposes a copy of its first matrix, which should be the narrower one."""
    num_tokens, num_outputs = grad.shape
    # Accumulating a transposed gradient reads it across rows, which is slower for a large weight.
    if num_outputs > x.shape[1] and num_tokens > 2 * num_outputs:
        return _multiply_transposed(x.t(), grad.t()).t()
    return _multiply_transposed(grad.t(), x.t())


def _multiply_transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a b^T of a [..., K] and b [N, K] with the operator that torch's compiler uses for linear layers."""
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
