"""Seconds and memory of writing, verifying and loading a checkpoint on two FSDP2 ranks: on a disk, in an object store,
and in the background of training.

    python benchmarks/checkpoints.py --megabytes 2000

A random Qwen3 in float32 with AdamW's moments: 12 bytes a parameter. The object store is moto's local server, which is
not representative of a real one's speed. Prints a markdown table.

- `verify`: by the driver, before ranks load: hashes of all files on a disk, in threads; sizes alone in an object store,
  where a machine verifies what it downloads (`load`).
- `training waits`: seconds until the next step may begin. `complete`: until the checkpoint is there.
- Peak memory: of the rank with the highest increase.
"""

import argparse
import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each rank has a core

import torch
from benchmark_tools import describe_machine, print_table

from skyrl_train.algorithms.losses import PolicyLossRegistry
from skyrl_train.checkpoint_saver import CheckpointSaver
from skyrl_train.checkpoints import CheckpointStore, verify
from skyrl_train.config import TrainerConfig
from skyrl_train.orchestration.actor_group import ActorGroup
from skyrl_train.training_run import load_group
from skyrl_train.workers.policy_worker import PolicyWorker
from skyrl_train_testing.backend_checks import make_settings
from skyrl_train_testing.object_store import BUCKET, object_store
from skyrl_train_testing.rank_processes import ForkedRanks
from skyrl_train_testing.tiny_models import build_tiny_qwen3

NUM_RANKS = 2
HIDDEN = 1024
BYTES_A_PARAMETER = 12
PARAMETERS_A_LAYER = 9_441_280
TIMEOUT_SECONDS = 500.0
PEAK = "peak memory of a rank (GB)"
HEADER = ["where", "how", "training waits (s)", "complete (s)", PEAK, "verify (s)", "load (s)", PEAK]


class BenchmarkedWorker(PolicyWorker):
    """Rank of a policy that measures its memory."""

    def make_moments(self) -> None:
        """Take an optimizer step, on a gradient of ones."""
        for parameter in self.backend.transformer.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optim_step()

    def forget_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = _status("VmRSS")

    def peak(self) -> int:
        """Return the bytes above those at `forget_peak`."""
        return _status("VmHWM") - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


class Measurement:
    """Seconds and peak memory of what ranks do."""

    def __init__(self, group: ActorGroup):
        self._group = group

    async def of(self, call: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
        """Return the seconds that a call takes, and the peak memory of a rank in GB."""
        await self._group.call_all(BenchmarkedWorker.forget_peak)
        started = time.monotonic()
        await call()
        seconds = time.monotonic() - started
        return seconds, max(await self._group.call_all(BenchmarkedWorker.peak)) / 1e9


async def measure(group: ActorGroup, root: str, *, in_background: bool) -> list[str]:
    """Write a checkpoint, verify and load it. Returns a row of the table."""
    store = CheckpointStore(root)
    saver = CheckpointSaver(store, in_background=in_background, timeout_seconds=TIMEOUT_SECONDS)
    measurement = Measurement(group)
    completed: list[float] = []

    async def write_rest(folder: Path) -> None:
        (folder / "trainer_state.json").write_text("{}")

    async def save() -> None:
        await saver.save(1, [group], write_rest, lambda: completed.append(time.monotonic()))
        waits.append(time.monotonic() - started)
        await saver.wait()

    started, waits = time.monotonic(), list[float]()
    _, peak = await measurement.of(save)
    found = store.find(TrainerConfig(resume_mode="latest"))
    assert found is not None
    started_verifying = time.monotonic()
    verify(found.folder)
    verifying = time.monotonic() - started_verifying
    loading, load_peak = await measurement.of(lambda: load_group(group, found))
    place = "object store" if "://" in root else "disk"
    how = "beside the training" if in_background else "at once"
    figures = f"{waits[0]:.1f} {completed[0] - started:.1f} {peak:.2f} {verifying:.1f} {loading:.1f} {load_peak:.2f}"
    return [place, how, *figures.split()]


async def run(folder: Path, megabytes: int) -> None:
    num_layers = max(1, round(megabytes * 1e6 / BYTES_A_PARAMETER / PARAMETERS_A_LAYER))
    model = build_tiny_qwen3(hidden_size=HIDDEN, num_hidden_layers=num_layers, vocab_size=64)
    num_bytes = BYTES_A_PARAMETER * sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(folder / "model")
    del model
    cfg = make_settings(str(folder / "model"), {})
    args = (cfg, PolicyLossRegistry.get("regular"), 10)
    ranks = ForkedRanks("policy", BenchmarkedWorker, args, num_ranks=NUM_RANKS, log_folder=folder / "logs")
    group = ActorGroup("policy", ranks, device="cpu", timeout_seconds=TIMEOUT_SECONDS)
    try:
        await group.init_model()
        await group.call_all(BenchmarkedWorker.make_moments)
        print(f"{describe_machine()}; {num_bytes / 1e9:.2f} GB, {NUM_RANKS} FSDP2 ranks\n")
        rows = []
        for place in (str(folder / "disk"), f"{BUCKET}/benchmark"):
            for in_background in (False, True):
                rows.append(await measure(group, place, in_background=in_background))
                shutil.rmtree(folder / "disk", ignore_errors=True)
        print_table(HEADER, rows)
    finally:
        group.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="of the checkpoint")
    parser.add_argument("--directory", default=None, help="for files; default: the system's temporary folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, object_store(Path(folder) / "store.log"):
        asyncio.run(run(Path(folder), options.megabytes))


if __name__ == "__main__":
    main()
