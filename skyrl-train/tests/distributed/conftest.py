"""Real processes in one gloo group, each with a deadline."""

import asyncio
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle

from skyrl_train.distributed.process_group import find_free_port, init_process_group
from skyrl_train_testing.rank_processes import ForkedRanks


class GroupMember:
    """Actor that runs a function as one rank of a process group."""

    def compute(
        self, rank: int, num_ranks: int, port: int, device_type: str, function: Callable[..., Any], args: Any
    ) -> Any:
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        init_process_group(
            rank=rank,
            world_size=num_ranks,
            master_address="127.0.0.1",
            master_port=port,
            device=device,
            timeout_seconds=120,
        )
        answer = function(*args)
        dist.destroy_process_group()
        return answer


RunOnRanks = Callable[..., list[Any]]


@pytest.fixture
def run_on_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunOnRanks]:
    """`run_on_ranks(num_ranks, function, *args)`: the answers of `function(*args)` on ranks 0..n-1 of one group."""
    modules = [request.module, sys.modules[__name__]]  # which the processes cannot import
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    num_calls = 0

    def run(
        num_ranks: int, function: Callable[..., Any], *args: Any, device: str = "cpu", timeout_seconds: float = 240.0
    ) -> list[Any]:
        nonlocal num_calls
        num_calls += 1
        port = find_free_port()
        ranks = ForkedRanks(f"call_{num_calls}", GroupMember, num_ranks=num_ranks, log_folder=tmp_path)
        calls = [[("compute", (rank, num_ranks, port, device, function, args))] for rank in range(num_ranks)]
        try:
            answers = asyncio.run(ranks.call(calls, timeout_seconds, "the deadline of this test"))
        finally:
            ranks.kill()
        return [answer for [answer] in answers]

    yield run
    for module in modules:
        cloudpickle.unregister_pickle_by_value(module)
