"""DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509): ranks that share sequences.

Everywhere but in attention each rank holds a slice of the tokens. Around attention one all-to-all turns a slice of the
tokens with all heads into all tokens with a share of the heads, and another one turns the answer back. Works on any
device and in any dtype that the process group takes. Knows no model.

Shapes: B sequences, N heads, S tokens (S/n on each of n ranks), D the size of a head.
"""

from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.errors import ConfigError


class SequenceParallel:
    """A process group whose ranks share sequences. `gather`, `to_heads` and `to_sequence` are collectives.

    Args:
        group: the ranks; their order in it is the order of their slices.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def check_heads(self, num_heads: int) -> None:
        """Check that the ranks can share so many attention heads (of key-value heads, any number will do).

        Raises:
            ConfigError: they cannot.
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
            raise ValueError(f"{self.size} ranks cannot share {length} positions: pad to a multiple")
        return x.narrow(dim, self.rank * (length // self.size), length // self.size)

    def gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole, from the ranks' slices of equal length.

        Backward: the part of the gradient that belongs to this rank's slice, without a sum over ranks. So it is right
        where every rank computes the same loss of the whole: each then has the gradient of its own slice, and the
        ranks' gradients of a shared weight add up to the weight's.
        """
        whole: torch.Tensor = _Gather.apply(x, dim, self)  # type: ignore[assignment]
        return whole

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, S/n, D] -> [B, N/n, S, D]: from a slice of the tokens to a share of the heads.

        Where n does not divide N (grouped-query attention with few key-value heads), heads are repeated to the least
        common multiple first, so that rank r still has exactly the key-value heads of its query heads, r N/n and on.
        """
        repeats = self.size // gcd(x.shape[1], self.size)
        if repeats > 1:
            x = x.repeat_interleave(repeats, dim=1)
        # [B, n, N/n, S/n, D]: share j goes to rank j, and what comes from rank i is slice i of the tokens.
        received = self._exchange(x.unflatten(1, (self.size, -1)).movedim(1, 0))
        return received.movedim(0, 2).flatten(2, 3)

    def to_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N/n, S, D] -> [B, N, S/n, D]: from a share of the heads back to a slice of the tokens."""
        received = self._exchange(x.unflatten(2, (self.size, -1)).movedim(2, 0))
        return received.movedim(0, 1).flatten(1, 2)

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Part j of the first dimension [n, ...] goes to rank j; part i of the answer came from rank i."""
        received: torch.Tensor = _AllToAll.apply(x, self.group)  # type: ignore[assignment]
        return received


def make_sequence_parallel(size: int, timeout_seconds: float = 600.0) -> SequenceParallel | None:
    """Make groups of `size` consecutive ranks. A collective: every rank must call it. Returns: this rank's own group.

    Args:
        timeout_seconds: the deadline of every exchange.

    Returns:
        None for size 1: nothing is shared.

    Raises:
        ValueError: `size` does not divide the number of ranks.
    """
    world_size = dist.get_world_size()
    if size < 1 or world_size % size:
        raise ValueError(f"sequence_parallel_size must divide the number of ranks, {world_size}; got {size}")
    if size == 1:
        return None
    # Every rank makes all groups, also those that it is not in, and in the same order.
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=timeout_seconds))
    assert isinstance(group, dist.ProcessGroup), "new_subgroups puts every rank into one"
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
        # Every rank computes the same loss from the gathered whole, so its slice of the gradient is complete: a sum
        # over ranks would count it once for each of them.
        return ctx.ranks.shard(grad, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    """y_r[i] = x_i[r] on ranks r; hence its gradient is the same exchange: dx_i[r] = dy_r[i]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_to_all(grad, ctx.group), None


def _all_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    # The exchange reads memory as it lies: a view by `movedim` would send other elements.
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
