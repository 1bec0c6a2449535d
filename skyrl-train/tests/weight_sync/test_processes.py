"""Trainer and engines in processes of their own: what dies or hangs is named in time, and the next try works."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.distributed.process_group import find_free_port
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.weight_sync.payload import NamedTensor, Payload
from skyrl_train.weight_sync.plan import Route, init_infos_for
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train_testing.weight_holders import CPU, HolderInfo, HolderProcesses, WeightHolder
from skyrl_train_testing.weight_sources import BlockingSender

pytestmark = pytest.mark.slow

WAYS = [("shared_memory", "full"), ("broadcast", "full"), ("checkpoint", "full"), ("shared_memory", "delta")]
FULL = [pytest.param(ways, marks=pytest.mark.full) for ways in WAYS]
DEADLINE_SECONDS = 10.0


def weights(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{index}", torch.full((100, 1000), version + index).bfloat16()) for index in range(6)]


def sender_to(engines: HolderProcesses, count: int, ways: tuple[Any, Any], folder: Path, most: int) -> BlockingSender:
    infos = init_infos_for(
        [Route(*ways)] * count,
        [HolderInfo()] * count,
        master_address="127.0.0.1",
        master_port=find_free_port(),
        directory=str(folder),
        verification="full",
        timeout_seconds=DEADLINE_SECONDS,
    )
    return BlockingSender(engines.engines, infos, max_bucket_bytes=most)


def weights_with_a_blow(process: Any, blow: signal.Signals) -> Iterator[NamedTensor]:
    """Six buckets; engine 1 gets `blow` in the midst of them."""
    for index, item in enumerate(weights(2)):
        if index == 3:
            os.kill(process.pid, blow)
        yield item


@pytest.mark.parametrize("ways", [FULL[0], *WAYS[1:3], FULL[3]], ids="-".join)
@pytest.mark.parametrize(
    "blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)], ids=lambda blow: blow.name
)
def test_engine_crash_or_hang_during_sync_is_named_and_retry_succeeds(ways, blow, tmp_path):
    """Staged ways are over with the buckets before engines are called: there the blow falls before the first."""
    holder = partial(WeightHolder.of_shapes, [(f"p{index}", (100, 1000)) for index in range(6)], torch.bfloat16)
    with HolderProcesses(2, holder, timeout_seconds=DEADLINE_SECONDS) as engines:
        engines.wait_for_start()
        sender = sender_to(engines, 2, ways, tmp_path, most=200_000)
        sender.send(weights(1), 1)
        began = time.monotonic()
        # Engine 0 may wait for engine 1 in the broadcast.
        died = r"of version 2 .*(engine 1: died|engine [01] did not answer|group)"
        with pytest.raises(WeightSyncError, match=died):
            sender.send(weights_with_a_blow(engines.processes[1], blow), 2)
        assert time.monotonic() - began < 3 * DEADLINE_SECONDS
        sender.close()
        engines.restart(1)
        sender = sender_to(engines, 2, ways, tmp_path, most=200_000)
        assert sender.send(weights(3), 3).metrics["payload_bytes"] == 6 * 200_000
        sender.close()


SENDER_THAT_STOPS_HALFWAY = """
import sys, time, torch
from skyrl_train.weight_sync.base import WeightSyncInitInfo
from skyrl_train.weight_sync.broadcast import BroadcastWriter
info = WeightSyncInitInfo(transport="broadcast", master_address="127.0.0.1", master_port=int(sys.argv[1]), world_size=2,
                          timeout_seconds=30.0)
writer = BroadcastWriter(info, torch.device("cpu"))
print("met", flush=True)
time.sleep(60)
"""


def test_engine_detects_trainer_killed_during_broadcast(tmp_path):
    port = find_free_port()
    command = [sys.executable, "-c", SENDER_THAT_STOPS_HALFWAY, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        info = WeightSyncInitInfo(
            transport="broadcast",
            master_address="127.0.0.1",
            master_port=port,
            rank=1,
            world_size=2,
            timeout_seconds=60,
        )
        receiver = WeightReceiver(info, CPU)
        assert trainer.stdout is not None and trainer.stdout.readline() == "met\n"
        trainer.kill()
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="died or did not answer in time"):
            receiver.receive(Payload.of(weights(1)).request(version=1, index=0))
        assert time.monotonic() - began < 10  # at once, not after the deadline


TRAINER_WITH_MEMORY_AND_FILES = """
import sys, time, torch
from skyrl_train.weight_sync.payload import NamedTensor, Payload
from skyrl_train.weight_sync.shared_memory import SharedMemoryWriter
from skyrl_train.weight_sync.staging import DeltaStage
bucket = [("a", torch.ones(1000, 1000))]
stage, writer = DeltaStage(sys.argv[1]), SharedMemoryWriter()
stage.begin(1)
stage.add(Payload.of(bucket))
stage.end(1)
print(writer.write(Payload.of(bucket), 1, 0)["location"], flush=True)
time.sleep(60)
"""


def test_killed_trainer_leaves_no_shared_memory_or_files(tmp_path):
    command = [sys.executable, "-c", TRAINER_WITH_MEMORY_AND_FILES, str(tmp_path)]
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        location = trainer.stdout.readline().strip()
        assert os.stat(location).st_size == 4_000_000
        assert set(os.listdir("/dev/shm")) <= before | {name for name in os.listdir("/dev/shm") if "weight" not in name}
        trainer.kill()
    assert not os.path.exists(location)
    assert list(tmp_path.iterdir()) == []


def peak_bytes(pid: int, *, reset: bool = False) -> int:
    """The most resident memory of a process since the last reset."""
    if reset:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.mark.first_case
@pytest.mark.parametrize("ways", [FULL[0], WAYS[1], FULL[2], WAYS[3]], ids="-".join)
def test_peak_memory_is_few_buckets_on_both_sides(ways, tmp_path):
    """A model of 320 MB in buckets of 20 MB, from 80 tensors of 4 MB (8 MB as float32) that are made one by one.
    Once both sides are warm, the most that they need besides is below half a model, allocators' slack included."""
    shapes, most = [(f"p{index}", (2000, 1000)) for index in range(80)], 20_000_000
    holder = partial(WeightHolder.of_shapes, shapes, torch.bfloat16)
    with HolderProcesses(1, holder, timeout_seconds=60) as engines:
        engines.wait_for_start()
        sender = sender_to(engines, 1, ways, tmp_path, most)
        pids = {"trainer": os.getpid(), "engine": engines.processes[0].pid}
        before: dict[str, int] = {}
        for version in (1, 2, 3):
            if version == 2:
                before = {side: peak_bytes(pid, reset=True) for side, pid in pids.items()}
            sender.send(made_one_by_one(shapes, version), version)
        extra = {side: peak_bytes(pid) - before[side] for side, pid in pids.items()}
        sender.close()
    assert all(value < 8 * most for value in extra.values()), extra


def made_one_by_one(shapes: list[tuple[str, tuple[int, int]]], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, shape) in enumerate(shapes):
        yield name, torch.full(shape, version + index).bfloat16()
