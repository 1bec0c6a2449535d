"""Real processes in one gloo group, each with a deadline."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

CHILD = """
import pickle, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from ray import cloudpickle

from skyrl_train.distributed.process_group import init_process_group

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nobody changes it in place
folder, device_type = Path(sys.argv[1]), sys.argv[2]
rank, num_ranks, port = map(int, sys.argv[3:])
device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.set_num_threads(1)
init_process_group(
    rank=rank,
    world_size=num_ranks,
    master_address="127.0.0.1",
    master_port=port,
    device=device,
    timeout_seconds=120,
)
function, args = cloudpickle.loads((folder / "call.pkl").read_bytes())
(folder / f"answer_{rank}.pkl").write_bytes(pickle.dumps(function(*args)))
dist.destroy_process_group()
"""

RunOnRanks = Callable[..., list[Any]]


@pytest.fixture
def run_on_ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunOnRanks]:
    """`run_on_ranks(num_ranks, function, *args)`: the answers of `function(*args)` on ranks 0..n-1 of one group."""
    cloudpickle.register_pickle_by_value(request.module)  # the processes cannot import a test
    started: list[subprocess.Popen[bytes]] = []

    def run(
        num_ranks: int, function: Callable[..., Any], *args: Any, device: str = "cpu", timeout_seconds: float = 240.0
    ) -> list[Any]:
        from skyrl_train.distributed.process_group import free_port

        folder = tmp_path / f"call_{len(started)}"
        folder.mkdir()
        (folder / "call.pkl").write_bytes(cloudpickle.dumps((function, args)))  # pyright: ignore[reportPrivateImportUsage]
        port = free_port()
        processes, logs = [], [folder / f"log_{rank}.txt" for rank in range(num_ranks)]
        for rank, log in enumerate(logs):
            command = [sys.executable, "-c", CHILD, str(folder), device, str(rank), str(num_ranks), str(port)]
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        started.extend(processes)
        deadline = time.monotonic() + timeout_seconds
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        texts = "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(logs))
        assert codes == [0] * num_ranks, f"ranks ended with {codes} (None: still running)\n{texts}"
        return [pickle.loads((folder / f"answer_{rank}.pkl").read_bytes()) for rank in range(num_ranks)]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
    cloudpickle.unregister_pickle_by_value(request.module)
