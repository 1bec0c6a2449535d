"""Seconds and peak memory of loading a model on two ranks: each reads its part from files, or rank 0 loads the whole
model and gives each its part (as it does for files that cannot be read in parts).

    python benchmarks/loading.py --megabytes 2000

A random Qwen3 in bfloat16 files, and one with experts; kept in float32. It is not trained: no gradients, no optimizer.
Prints a markdown table.

- Memory is that of each rank above what it held before. "With pages of files" counts what it has mapped, too, which the
  system takes back when memory is short. What a fork server imported before does not count.
- `check`: the comparison of scores on rank 0, which is part of loading and in `seconds`.
"""

import argparse
import asyncio
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: each rank has a core

import torch
from transformers import PreTrainedModel

from skyrl_train.distributed.process_group import free_port
from skyrl_train.training_backends import transformers_backend
from skyrl_train.training_backends.base import RankInfo
from skyrl_train.workers.worker import RefWorker
from skyrl_train_testing.backend_checks import settings_of
from skyrl_train_testing.rank_processes import ForkedRanks
from skyrl_train_testing.tiny_models import tiny_mixture, tiny_qwen3

NUM_RANKS = 2
HIDDEN = 1024
BYTES_A_PARAMETER = 4
PARAMETERS_A_LAYER = 9_441_280
EXPERTS = dict(num_experts=16, moe_intermediate_size=256)
PARAMETERS_A_SPARSE_LAYER = 16_000_000
TIMEOUT_SECONDS = 500.0
DIVISIONS: dict[str, dict[str, Any]] = {
    "FSDP2": {},
    "DeepSpeed, stage 3": {"strategy": "deepspeed", "stage": 3},
    "DeepSpeed, stage 0": {"strategy": "deepspeed", "stage": 0},
}


class Loading(NamedTuple):
    """Cost of loading on one rank."""

    seconds: float
    check_seconds: float
    peak: int
    """Bytes of its own."""
    peak_with_files: int


class MeasuredWorker(RefWorker):
    """Rank of a reference model that measures its loading."""

    def load(self, info: RankInfo, in_parts: bool) -> Loading:
        """Join the group and load the model."""
        self.backend.join(info)
        checks: list[float] = []
        if not in_parts:
            transformers_backend.open_on_all_ranks = lambda *_: None
        check = transformers_backend.check_scoring

        def timed_check(*args: Any) -> None:
            started = time.monotonic()
            check(*args)
            checks.append(time.monotonic() - started)

        transformers_backend.check_scoring = timed_check
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before, with_files = _memory("RssAnon"), _memory("VmRSS")
        peaks, is_loaded = [before], threading.Event()

        def watch() -> None:
            while not is_loaded.wait(0.002):
                peaks.append(_memory("RssAnon"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        started = time.monotonic()
        self.backend.load_model()
        seconds = time.monotonic() - started
        is_loaded.set()
        watcher.join()
        return Loading(seconds, sum(checks), max(peaks) - before, _memory("VmHWM") - with_files)


def _memory(name: str) -> int:
    """Return an entry of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


async def measure(model: Path, division: str, folder: Path, *, in_parts: bool) -> list[Loading]:
    """Load a model on new ranks."""
    settings = dict(DIVISIONS[division])
    stage = settings.pop("stage", None)
    ref: dict[str, Any] = {"model": {"path": str(model)}}
    if stage is not None:
        ref["deepspeed_config"] = {"zero_optimization": {"stage": stage}}
    cfg = settings_of(str(model), settings | {"ref": ref})
    ranks = ForkedRanks("ref", MeasuredWorker, (cfg,), num_ranks=NUM_RANKS, log_folder=folder)
    port = free_port()
    infos = [RankInfo(rank=rank, world_size=NUM_RANKS, master_port=port) for rank in range(NUM_RANKS)]
    try:
        answers = await ranks.call([[("load", (info, in_parts))] for info in infos], TIMEOUT_SECONDS, "--megabytes")
        return [answer for [answer] in answers]  # type: ignore[misc]
    finally:
        ranks.kill()


def new_models(folder: Path, megabytes: int) -> dict[str, tuple[Path, int]]:
    """Write the models. Returns: their folders and bytes in float32."""
    parameters = megabytes * 1e6 / BYTES_A_PARAMETER
    sizes: dict[str, Any] = dict(vocab_size=8192, hidden_size=HIDDEN)
    dense, sparse = (max(1, round(parameters / each)) for each in (PARAMETERS_A_LAYER, PARAMETERS_A_SPARSE_LAYER))
    make: dict[str, Callable[[], PreTrainedModel]] = {
        "dense": lambda: tiny_qwen3(**sizes, num_hidden_layers=dense),
        "experts": lambda: tiny_mixture(**sizes, **EXPERTS, num_attention_heads=8, num_hidden_layers=sparse),
    }
    models = {}
    for name, new in make.items():
        model = new()
        model.to(torch.bfloat16).save_pretrained(folder / name, max_shard_size="500MB")  # pyright: ignore[reportArgumentType]
        models[name] = folder / name, BYTES_A_PARAMETER * sum(parameter.numel() for parameter in model.parameters())
    return models


async def run(folder: Path, megabytes: int) -> None:
    models = new_models(folder, megabytes)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {version_of('torch')}; "
        f"{NUM_RANKS} ranks\n\n| model | divided by | read by | seconds | of it the check (s) | rank 0 (GB) | "
        "with pages of files (GB) | rank 1 (GB) | with pages of files (GB) |\n|---|---|---"
        "|---:|---:|---:|---:|---:|---:|",
        flush=True,
    )
    for name, (model, size) in models.items():
        for division in DIVISIONS:
            for in_parts in (False, True):
                first, second = await measure(model, division, folder / "logs", in_parts=in_parts)
                memory = [loading for rank in (first, second) for loading in (rank.peak, rank.peak_with_files)]
                print(
                    f"| {name}, {size / 1e9:.2f} GB | {division} | {'each rank' if in_parts else 'rank 0'} | "
                    f"{first.seconds:.1f} | {first.check_seconds:.1f} | "
                    f"{' | '.join(f'{each / 1e9:.2f}' for each in memory)} |",
                    flush=True,
                )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000, help="of a model in float32")
    parser.add_argument("--directory", default=None, help="for files; default: the system's temporary folder")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        asyncio.run(run(Path(folder), options.megabytes))


if __name__ == "__main__":
    main()
