"""Attention in bfloat16 on a CPU with few keys: torch's forward, bit-exact, and its backward in float32.

The kernel's backward is slow in bfloat16 with few keys. Forward and backward of 28 rows of 64 queries and 96 keys, one
thread of an AMD EPYC: 16.0 ms in bfloat16 (forward 2.9); 8.5 in float32. With 256 keys both are
equally fast.
"""

from typing import Any

import torch

_FEW_KEYS = 256

_forward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def is_slow_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether `BackwardInFloat32` is faster for queries, keys and values [rows, heads, length, D]."""
    return (
        all(x.device.type == "cpu" and x.dtype == torch.bfloat16 for x in (q, k, v))
        and k.shape[2] < _FEW_KEYS
        and q.shape[3] == v.shape[3]  # the kernel needs equal head sizes
        and torch.is_grad_enabled()
        and any(x.requires_grad for x in (q, k, v))
        and _forward is not None
        and _backward is not None
    )


class BackwardInFloat32(torch.autograd.Function):
    """softmax(q k^T scale) v with the kernel of `scaled_dot_product_attention`."""

    @classmethod
    def attend(
        cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor:
        """Attend to the keys in `seen` [queries, keys] bool; None: causal, with as many queries as keys."""
        mask = None if seen is None else torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
        return cls.apply(q, k, v, mask, scale)  # type: ignore[return-value]

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor:
        assert _forward is not None
        answer, log_sums = _forward(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        ctx.save_for_backward(q, k, v, answer, log_sums, mask)
        ctx.scale = scale
        return answer

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert _backward is not None
        *saved, log_sums, mask = ctx.saved_tensors
        q, k, v, answer = (x.float() for x in saved)
        mask = None if mask is None else mask.float()
        grads = _backward(grad.float(), q, k, v, answer, log_sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
        return *(x.to(grad.dtype) for x in grads), None, None
