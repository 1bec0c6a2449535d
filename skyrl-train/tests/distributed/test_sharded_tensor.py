"""Gathering of tensors that are divided over ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from skyrl_train.distributed import sharded_tensor
from skyrl_train.distributed.process_group import build_mesh


def wholes() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"first": (4, 3), "second": (8,), "uneven": (5, 2), "third": (2, 6), "large": (16, 16), "last": (6, 1)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gathered(fsdp_size: int) -> tuple[dict[str, torch.Tensor], int, int]:
    """Returns: the tensors from ranks that hold their parts, the collectives for all of them, and those one by one."""
    sharded_tensor.GATHERED_BYTES = 16 * 16 * 4 - 1  # "large" travels alone
    mesh = build_mesh(torch.device("cpu"), fsdp_size)
    placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
    parts: dict[str, Any] = {name: distribute_tensor(whole, mesh, placements) for name, whole in wholes().items()}
    parts["columns"] = distribute_tensor(wholes()["first"], mesh, [*placements[:-1], Shard(1)])
    parts["undivided"] = wholes()["first"]
    calls = 0
    all_gather = dist.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_gather(*args, **kwargs)

    dist.all_gather = counted
    try:
        dtypes = {name: torch.bfloat16 if name in ("third", "undivided") else torch.float32 for name in parts}
        tensors = ((name, part, dtypes[name]) for name, part in parts.items())
        together = dict(sharded_tensor.gather_full_tensors(tensors))
    finally:
        dist.all_gather = all_gather
    return together, calls, sum(isinstance(part, DTensor) for part in parts.values())


def test_batched_gather_matches_all_ranks(run_on_ranks: Callable[..., list[Any]]):
    expected = wholes()
    expected |= {"columns": expected["first"], "undivided": expected["first"].bfloat16()}
    expected["third"] = expected["third"].bfloat16()
    for num_ranks, fsdp_size in [(2, -1), (4, 2)]:
        for together, calls, num_divided in run_on_ranks(num_ranks, gathered, fsdp_size):
            assert list(together) == [*wholes(), "columns", "undivided"], "in order"
            for name, whole in expected.items():
                assert together[name].dtype == whole.dtype and together[name].equal(whole), name
            assert calls == 3 < num_divided, "first + second, third (another dtype), last"
