"""A process that dies or hangs ends the run with an error that names it, in time. Nothing waits for ever."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.errors import WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def stopwatch() -> Iterator[dict[str, float]]:
    yield {}


async def signal_soon(pid: int, number: signal.Signals, times: dict[str, float], seconds: float = 1.0) -> None:
    """Sends a signal while the test waits elsewhere, and notes when."""

    def send() -> None:
        os.kill(pid, number)
        times["sent"] = time.monotonic()

    threading.Timer(seconds, send).start()


@pytest.mark.parametrize("colocate_all", [False])
async def test_a_policy_rank_killed_in_the_middle_of_a_step(start_run, prompt, tmp_path: Path, colocate_all):
    changes = {
        "placement": {"policy_num_gpus_per_node": 2, "colocate_all": colocate_all},
        "update_epochs_per_batch": 1000,  # it would learn for minutes
    }
    times: dict[str, float] = {}
    async with start_run(tmp_path, [[prompt("works")] * 2], trainer=changes) as trainer:
        pids = trainer.policy_model.pids()
        train_policy = trainer.train_policy

        async def kill_while_training(batch):
            await signal_soon(pids[1], signal.SIGKILL, times)
            await train_policy(batch)

        trainer.train_policy = kill_while_training
        with pytest.raises(WorkerError, match=r"(?s)policy worker 1 died.*end of .*policy_1.log.*=== process \d+") as e:
            await trainer.train()
        print(e.value)
        assert time.monotonic() - times["sent"] < 30


async def test_a_policy_rank_that_hangs(start_run, prompt, tmp_path: Path):
    changes = {
        "placement": {"policy_num_gpus_per_node": 2, "colocate_all": False},
        "update_epochs_per_batch": 1000,
        "worker_timeout_seconds": 10,
    }
    times: dict[str, float] = {}
    async with start_run(tmp_path, [[prompt("works")] * 2], trainer=changes) as trainer:
        pids = trainer.policy_model.pids()
        train_policy = trainer.train_policy

        async def stop_while_training(batch):
            await signal_soon(pids[1], signal.SIGSTOP, times)
            await train_policy(batch)

        trainer.train_policy = stop_while_training
        try:
            with pytest.raises(WorkerError) as e:
                await trainer.train()
        finally:
            os.kill(pids[1], signal.SIGCONT)
        print(e.value)
        assert time.monotonic() - times["sent"] < 30


async def test_an_engine_killed_while_it_generates(start_run, prompt, tmp_path: Path):
    times: dict[str, float] = {}
    long = {"sampling_params": {"max_generate_length": 180, "additional_kwargs": {"ignore_eos": True}}}
    async with start_run(tmp_path, [[prompt("works")] * 8], generator=long) as trainer:
        [engine] = trainer.inference_engine_client.engines
        pid = await asyncio.to_thread(engine.pid)
        generate = trainer.generate

        async def kill_while_generating(prompts):
            await signal_soon(pid, signal.SIGKILL, times, 0.3)
            return await generate(prompts)

        trainer.generate = kill_while_generating
        with pytest.raises(WorkerError, match=r"(?s)engine 0 died.*engine_0.log") as e:
            await trainer.train()
        print(e.value)
        assert time.monotonic() - times["sent"] < 30
        with pytest.raises(WorkerError, match=r"(?s)engine 0 died"):
            await trainer.sync_weights()
