"""A process that dies or hangs ends the run with an error that names it, in time. Nothing waits for ever."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import SkyRLError, WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LEARNS_FOR_MINUTES = {"update_epochs_per_batch": 1000}
TWO_RANKS = {"placement": {"policy_num_gpus_per_node": 2, "colocate_all": False}}
WRITES_FOR_SECONDS = {"sampling_params": {"max_generate_length": 180, "additional_kwargs": {"ignore_eos": True}}}


class Later:
    """Thread that sends a signal to a process while the test waits elsewhere, and records when it did."""

    def __init__(self, pid: int, number: signal.Signals, seconds: float):
        self._timer = threading.Timer(seconds, self._send, (pid, number))
        self._timer.start()
        self._sent_at: float | None = None

    def _send(self, pid: int, number: signal.Signals) -> None:
        os.kill(pid, number)
        self._sent_at = time.monotonic()

    def seconds_ago(self) -> float:
        assert self._sent_at is not None, "the wait ended before the signal was sent"
        return time.monotonic() - self._sent_at


def before(trainer: Any, method: str, action: Callable[[], Any]) -> None:
    """Make the trainer run an action just before one of its methods."""
    original = getattr(trainer, method)

    async def both(*args: Any) -> Any:
        action()
        return await original(*args)

    setattr(trainer, method, both)


async def test_policy_rank_killed_during_step_ends_run(start_run_with_ray, prompt, tmp_path: Path):
    """The other rank raises, too, and first: its peer hung up. The error is about the one that died."""
    async with start_run_with_ray(tmp_path, [[prompt("works")] * 2], trainer=TWO_RANKS | LEARNS_FOR_MINUTES) as trainer:
        later: list[Later] = []
        victim = trainer.policy_model.ranks.pids()[1]
        before(trainer, "train_policy", lambda: later.append(Later(victim, signal.SIGKILL, 1.0)))
        with pytest.raises(WorkerError) as error:
            await trainer.train()
        assert later[0].seconds_ago() < 30
        assert str(error.value).startswith("policy worker 1 died: ")
        assert f"end of {tmp_path / 'logs' / 'policy_1.log'}:\n=== process {victim} started" in str(error.value)


@pytest.mark.full  # faults/test_waiting_for_processes.py has the deadline; the stopped rank costs a minute
async def test_hanging_policy_rank_ends_run(start_run_with_ray, prompt, tmp_path: Path):
    changes = TWO_RANKS | LEARNS_FOR_MINUTES | {"worker_timeout_seconds": 12}
    async with start_run_with_ray(tmp_path, [[prompt("works")] * 2], trainer=changes) as trainer:
        later: list[Later] = []
        victim = trainer.policy_model.ranks.pids()[1]
        before(trainer, "train_policy", lambda: later.append(Later(victim, signal.SIGSTOP, 1.0)))
        # Either our deadline passes first, or that of the other rank, which waits for this one.
        expected = "did not answer within 12 s .trainer.worker_timeout_seconds|no response yet from policy worker 1"
        with pytest.raises(WorkerError, match=expected) as error:
            await trainer.train()
        assert "policy worker 1" in str(error.value)
        assert later[0].seconds_ago() < 40


@pytest.mark.full
async def test_hanging_engine_fails_rollouts_at_deadline(start_run_with_ray, prompt, tmp_path: Path):
    changes = WRITES_FOR_SECONDS | {"request_timeout_seconds": 2, "max_rollout_retries": 1}
    own_cores = {"placement": {"colocate_all": False}}
    async with start_run_with_ray(tmp_path, [[prompt("works")]], trainer=own_cores, generator=changes) as trainer:
        victim = trainer.inference_engine_client.engines[0].pid()
        before(trainer, "generate", lambda: os.kill(victim, signal.SIGSTOP))
        began = time.monotonic()
        expected = "all 4 rollouts of step 1 failed.*infrastructure: the engine did not respond within "
        with pytest.raises(SkyRLError, match=expected + "generator.request_timeout_seconds=2"):
            await trainer.train()
        assert time.monotonic() - began < 60


async def test_engine_start_failure_ends_run(start_run_with_ray, prompt, tmp_path: Path):
    """The trainer would meet it in a process group, and does not wait there for ten minutes."""
    began = time.monotonic()
    changes = {"placement": {"colocate_all": False}}
    nonsense = {"engine_init_kwargs": {"max_model_len": -9}}
    async with start_run_with_ray(tmp_path, [[prompt("works")]], trainer=changes, generator=nonsense) as trainer:
        with pytest.raises(WorkerError, match="max_model_len"):
            await trainer.train()
    assert time.monotonic() - began < 100
