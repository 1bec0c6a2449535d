"""DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): sequence parallelism.

Outside of attention each rank holds a slice of the tokens. Before attention an all-to-all converts a slice of the
tokens with all heads into all tokens with a part of the heads, and another one converts the result back. Works on any
device and in any dtype that the process group supports.

Shapes: B sequences, N heads, S tokens (S/n on each of n ranks), D the size of a head.
"""

from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.errors import ConfigError


class SequenceParallel:
    """Process group whose ranks share sequences. `gather`, `to_heads` and `to_sequence` are collectives.

    Args:
        group: the ranks; their order is the order of their slices.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def check_heads(self, num_heads: int) -> None:
        """Check that the ranks divide the number of attention heads (any number of key-value heads is supported).

        Raises:
            ConfigError: they do not.
        """
        if num_heads % self.size:
            raise ConfigError(
                f"sequence_parallel_size={self.size} must divide the number of the model's attention heads, {num_heads}"
            )

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's slice of a tensor that all ranks hold.

        Raises:
            ValueError: the ranks do not divide its length.
        """
        length = x.shape[dim]
        if length % self.size:
            raise ValueError(f"{length} positions cannot be split over {self.size} ranks: pad to a multiple")
        return x.narrow(dim, self.rank * (length // self.size), length // self.size)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Gather a tensor from the ranks' slices of equal length.

        Backward: the slice of the gradient that belongs to this rank, without a sum over ranks. This is correct if
        every rank computes the same loss from the gathered tensor: each then has the gradient of its slice, and the
        ranks' gradients of a shared weight add up to the full gradient.
        """
        whole: torch.Tensor = _Gather.apply(x, dim, self)  # type: ignore[assignment]
        return whole

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [B, N, S/n, D] -> [B, N/n, S, D]: from a slice of the tokens to a part of the heads.

        If n does not divide N (grouped-query attention with few key-value heads), heads are first repeated to the least
        common multiple, so that rank r still has exactly the key-value heads of its query heads, from r N/n.
        """
        repeats = self.size // gcd(x.shape[1], self.size)
        if repeats > 1:
            x = x.repeat_interleave(repeats, dim=1)
        # [B, n, N/n, S/n, D]: part j is sent to rank j, and the part received from rank i is slice i of the tokens.
        received = self._exchange(x.unflatten(1, (self.size, -1)).movedim(1, 0))
        return received.movedim(0, 2).flatten(2, 3)

    def to_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Exchange [B, N/n, S, D] -> [B, N, S/n, D]: from a part of the heads back to a slice of the tokens."""
        received = self._exchange(x.unflatten(2, (self.size, -1)).movedim(2, 0))
        return received.movedim(0, 1).flatten(1, 2)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send part j of the first dimension [n, ...] to rank j; part i of the result is received from rank i."""
        received: torch.Tensor = _AllToAll.apply(x, self.group)  # type: ignore[assignment]
        return received


def build_sequence_parallel(size: int, timeout_seconds: float = 600.0) -> SequenceParallel | None:
    """Create groups of `size` consecutive ranks, and return this rank's group. A collective: every rank must call it.

    Args:
        timeout_seconds: timeout of every exchange.

    Returns:
        None for size 1.

    Raises:
        ValueError: `size` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if size < 1 or world_size % size:
        raise ValueError(f"sequence_parallel_size must divide the number of ranks, {world_size}; got {size}")
    if size == 1:
        return None
    # Every rank creates all groups, also those without it, in the same order.
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_seconds))
    assert isinstance(group, dist.ProcessGroup), "new_subgroups assigns every rank to a group"
    return SequenceParallel(group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, ranks: SequenceParallel) -> torch.Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        pieces = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(ranks.size)]
        dist.all_gather(pieces, x.contiguous(), group=ranks.group)
        return torch.cat(pieces, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Every rank computes the same loss from the gathered tensor, so its slice of the gradient is complete: a sum
        # over ranks would count it once per rank.
        return ctx.ranks.shard(grad, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    """y_r[i] = x_i[r] on ranks r; hence its gradient is the same exchange: dx_i[r] = dy_r[i]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _run_all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _run_all_to_all(grad, ctx.group), None


def _run_all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # The exchange reads contiguous memory: a view by `movedim` would send other elements.
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
