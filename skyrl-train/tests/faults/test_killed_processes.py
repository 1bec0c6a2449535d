"""A process that dies or hangs ends the run with an error that names it, in time. Nothing waits for ever."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import SkyRLError, WeightSyncError, WorkerError
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.ray_wrapped_inference_engine import EngineProcess, RayWrappedInferenceEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LEARNS_FOR_MINUTES = {"update_epochs_per_batch": 1000}
TWO_RANKS = {"placement": {"policy_num_gpus_per_node": 2, "colocate_all": False}}
WRITES_FOR_SECONDS = {"sampling_params": {"max_generate_length": 180, "additional_kwargs": {"ignore_eos": True}}}


class Later:
    """Sends a signal to a process while the test waits elsewhere, and knows how long ago."""

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
    """Has the trainer do something just before one of its steps."""
    original = getattr(trainer, method)

    async def both(*args: Any) -> Any:
        action()
        return await original(*args)

    setattr(trainer, method, both)


async def test_a_policy_rank_killed_in_the_middle_of_a_step(start_run, prompt, tmp_path: Path):
    """The other rank raises, too, and first: its peer hung up. The error is about the one that died."""
    async with start_run(tmp_path, [[prompt("works")] * 2], trainer=TWO_RANKS | LEARNS_FOR_MINUTES) as trainer:
        later: list[Later] = []
        victim = trainer.policy_model.pids()[1]
        before(trainer, "train_policy", lambda: later.append(Later(victim, signal.SIGKILL, 1.0)))
        with pytest.raises(WorkerError) as error:
            await trainer.train()
        assert later[0].seconds_ago() < 30
        assert str(error.value).startswith("policy worker 1 died: ")
        assert f"end of {tmp_path / 'logs' / 'policy_1.log'}:\n=== process {victim} started" in str(error.value)


async def test_a_policy_rank_that_hangs(start_run, prompt, tmp_path: Path):
    changes = TWO_RANKS | LEARNS_FOR_MINUTES | {"worker_timeout_seconds": 12}
    async with start_run(tmp_path, [[prompt("works")] * 2], trainer=changes) as trainer:
        later: list[Later] = []
        victim = trainer.policy_model.pids()[1]
        before(trainer, "train_policy", lambda: later.append(Later(victim, signal.SIGSTOP, 1.0)))
        # Either our deadline passes first, or that of the other rank, which waits for this one.
        expected = "did not answer within 12 s .trainer.worker_timeout_seconds|no answer yet from policy worker 1"
        with pytest.raises(WorkerError, match=expected) as error:
            await trainer.train()
        assert "policy worker 1" in str(error.value)
        assert later[0].seconds_ago() < 40


async def test_an_engine_killed_while_it_generates(start_run, prompt, tmp_path: Path):
    async with start_run(tmp_path, [[prompt("works")] * 8], generator=WRITES_FOR_SECONDS) as trainer:
        later: list[Later] = []
        victim = trainer.inference_engine_client.engines[0].pid()
        before(trainer, "generate", lambda: later.append(Later(victim, signal.SIGKILL, 0.3)))
        with pytest.raises(WorkerError, match=rf"(?s)^engine 0 died: .*engine_0.log:\n=== process {victim} started"):
            await trainer.train()
        assert later[0].seconds_ago() < 30
        with pytest.raises(WorkerError, match=r"^engine 0 died: "):  # and whoever needs it next hears the same
            await trainer.sync_weights()


async def test_an_engine_that_hangs_costs_its_rollouts_a_deadline(start_run, prompt, tmp_path: Path):
    changes = WRITES_FOR_SECONDS | {"request_timeout_seconds": 2, "max_rollout_retries": 1}
    own_cores = {"placement": {"colocate_all": False}}
    async with start_run(tmp_path, [[prompt("works")]], trainer=own_cores, generator=changes) as trainer:
        victim = trainer.inference_engine_client.engines[0].pid()
        before(trainer, "generate", lambda: os.kill(victim, signal.SIGSTOP))
        began = time.monotonic()
        expected = "all 4 rollouts of step 1 failed.*infrastructure: the engine did not answer within "
        with pytest.raises(SkyRLError, match=expected + "generator.request_timeout_seconds=2"):
            await trainer.train()
        assert time.monotonic() - began < 60


def loses_a_weight(make_engine: Callable[[], InferenceEngineInterface]) -> Callable[[], InferenceEngineInterface]:
    """Makes an engine in which one number changes just before the update to version 1 is finished."""

    def make() -> Any:
        import torch

        engine: Any = make_engine()
        finish = engine.finish_weight_update

        async def finish_after_damage(version: int) -> int:
            if version == 1:
                with torch.inference_mode():
                    next(iter(engine._weights._parameters.values())).view(-1)[7] += 1e-3
            return await finish(version)

        engine.finish_weight_update = finish_after_damage
        return engine

    return make


async def test_weights_that_did_not_arrive_are_noticed(start_run, scripted_experiment, prompt, tmp_path: Path):
    class WithFaultyMemory(scripted_experiment):
        def get_inference_client(self) -> InferenceEngineClient:
            import ray

            from skyrl_train.entrypoints.main_base import engine_factory
            from skyrl_train.workers.actor_group import actor_options

            log_file = str(self.run_folder.log_path("engine_0"))
            options = actor_options("cpu", 1.0, None, 0) | {"max_concurrency": 100}
            make = loses_a_weight(engine_factory(self.cfg, "cpu"))
            actor = ray.remote(EngineProcess).options(**options).remote(make, log_file)
            engine = RayWrappedInferenceEngine(actor, "engine 0", log_file, 60)
            return InferenceEngineClient([engine], self.tokenizer, self.cfg)

    async with start_run(tmp_path, [[prompt("works")]], experiment=WithFaultyMemory) as trainer:
        with pytest.raises(WeightSyncError, match=r"after the sync of version 1, engine\(s\) \[0\] hold other weights"):
            await trainer.train()
        assert trainer.global_step == 1, "version 0 went well"


async def test_an_engine_that_cannot_start(start_run, prompt, tmp_path: Path):
    """The trainer would meet it in a process group, and does not wait there for ten minutes."""
    began = time.monotonic()
    changes = {"placement": {"colocate_all": False}}
    nonsense = {"engine_init_kwargs": {"max_model_length": 9}}
    async with start_run(tmp_path, [[prompt("works")]], trainer=changes, generator=nonsense) as trainer:
        with pytest.raises(WorkerError, match=r"engine 0 could not start: TypeError: .*'max_model_length'"):
            await trainer.train()
    assert time.monotonic() - began < 100
