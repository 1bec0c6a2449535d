"""Engines that are killed, stopped or lied to in the middle of a run: it goes on as if nothing had happened, or stops
with an error that names what is wrong."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.entrypoints import engines as entry
from skyrl_train.errors import WeightSyncError, WorkerError
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.inference_engines.base import InferenceEngineInterface
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train.weight_sync.base import LoraLoadRequest, WeightReport
from skyrl_train.workers.policy_worker import PolicyWorker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG_ANSWERS = {"sampling_params": {"max_generate_length": 120, "additional_kwargs": {"ignore_eos": True}}}
GENERATOR = LONG_ANSWERS | {
    "num_inference_engines": 2,
    "engine_health_interval_seconds": 1.0,
    "engine_control_timeout_seconds": 60.0,
    "weight_sync_canary_interval": 1,
    "weight_transfer_threshold_cuda_ipc_GB": 1e-5,
}
LEARNS = {"policy": {"optimizer_config": {"lr": 1e-2}}}
OWN_DEVICES = {"placement": {"colocate_all": False}} | LEARNS


class SlowPolicy(PolicyWorker):
    """A policy whose weights take their time on the way out."""

    def _parameters(self) -> Iterator[Any]:
        import time

        for parameter in super()._parameters():
            time.sleep(0.05)
            yield parameter


def with_slow_weights(experiment: type[Any]) -> type[Any]:
    class Slow(experiment):
        def get_trainer(self, **parts: Any) -> Any:
            trainer = super().get_trainer(**parts)
            trainer.build_models = partial(trainer.build_models, policy_worker=SlowPolicy)
            return trainer

    return Slow


def script(prompt: Callable[..., Any]) -> list[list[Any]]:
    return [[prompt("different_characters", f"{step}+{row}=") for row in range(4)] for step in range(2)]


@pytest.fixture(scope="module")
def undisturbed(start_run_with_ray, prompt, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")

    async def run() -> None:
        async with start_run_with_ray(folder, script(prompt), trainer=OWN_DEVICES, generator=GENERATOR) as trainer:
            await trainer.train()

    asyncio.run(run())
    return folder


def trajectories(folder: Path) -> list[Any]:
    """Read the trajectories of all steps: tokens and log-probs, to the bit."""
    return [
        (row["tokens"]["ids"], row["tokens"]["log_probs"], row["tokens"]["weight_versions"], row["reward"])
        for step in (1, 2)
        for row in RunFolder(folder).read_trajectories(step, "train")
    ]


def once(action: Callable[[], Any]) -> Callable[[], Any]:
    """`action`, at the first call alone."""
    actions = [action]
    return lambda: actions.pop()() if actions else None


def at(instance: Any, method: str, action: Callable[[], Any], *, seconds: float = 0.0, after: bool = False) -> None:
    """Has `action` done once, so many seconds after the method was called (or had returned)."""
    original, act = getattr(instance, method), once(action)

    async def disturbed(*args: Any) -> Any:
        if not after:
            asyncio.get_running_loop().call_later(seconds, act)
        answer = await original(*args)
        if after:
            act()
        return answer

    setattr(instance, method, disturbed)


def killer(trainer: Any, index: int, number: signal.Signals = signal.SIGKILL) -> Callable[[], None]:
    return partial(os.kill, trainer.inference_engine_client.engines[index].pid(), number)


@pytest.mark.parametrize("colocate_all", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "when",
    [
        # `inference_engines/test_chaos_client.py` kills one then, too
        pytest.param("while it generates", marks=pytest.mark.full),
        pytest.param("while it is paused", marks=pytest.mark.full),
        # `test_two_rank_sync_survives_engine_crash` kills one then, too
        pytest.param("during a sync", marks=pytest.mark.full),
        pytest.param("stopped, not killed", marks=pytest.mark.full),
    ],
)
async def test_run_survives_engine_crash(
    when, colocate_all, start_run_with_ray, scripted_experiment, prompt, undisturbed, tmp_path: Path
):
    """Every answer is there once, with the very tokens and log-probs of a run that nobody disturbed."""
    placement = LEARNS | {"placement": {"colocate_all": colocate_all}}
    own = {"experiment": with_slow_weights(scripted_experiment)} if when == "during a sync" else {}
    async with start_run_with_ray(tmp_path, script(prompt), trainer=placement, generator=GENERATOR, **own) as trainer:
        client = trainer.inference_engine_client
        if when == "while it generates":
            at(trainer, "generate", killer(trainer, 1), seconds=0.3)
        elif when == "while it is paused":
            at(client, "pause_generation", killer(trainer, 1), after=True)
        elif when == "during a sync":
            at(client, "pause_generation", killer(trainer, 1), seconds=0.5)
        else:
            at(trainer, "generate", killer(trainer, 1, signal.SIGSTOP), seconds=0.2)
        await trainer.train()
    assert sum(row["engines/restarts"] for row in RunFolder(tmp_path).read_metrics()) == 1
    assert trajectories(tmp_path) == trajectories(undisturbed)


async def test_two_rank_sync_survives_engine_crash(start_run_with_ray, scripted_experiment, prompt, tmp_path: Path):
    """Each rank serves one engine. The rank whose engine lives gathers nothing that the other does not, and both send
    again when the engine is back."""
    two_ranks = LEARNS | {"placement": {"colocate_all": True, "policy_num_gpus_per_node": 2}}
    own = {"experiment": with_slow_weights(scripted_experiment)}
    async with start_run_with_ray(tmp_path, script(prompt), trainer=two_ranks, generator=GENERATOR, **own) as trainer:
        at(trainer.inference_engine_client, "pause_generation", killer(trainer, 1), seconds=0.5)
        await trainer.train()
    metrics = RunFolder(tmp_path).read_metrics()
    assert sum(row["engines/restarts"] for row in metrics) == 1
    assert [row["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4 for row in metrics] == [True, True]


@pytest.mark.full
async def test_run_ends_when_restarts_are_exhausted(start_run_with_ray, prompt, tmp_path: Path):
    once_only = GENERATOR | {"max_engine_restarts": 0}
    async with start_run_with_ray(tmp_path, script(prompt), trainer=OWN_DEVICES, generator=once_only) as trainer:
        at(trainer, "generate", killer(trainer, 1), seconds=0.3)
        with pytest.raises(WorkerError, match=r"generator\.max_engine_restarts=0"):
            await trainer.train()


def asynchronously(scripted: type[Any]) -> type[Any]:
    """The same experiment, which generates groups while it trains. Its prompts are those of the first step of the
    script."""

    class Trainer(FullyAsyncRayPPOTrainer, scripted.trainer):
        pass

    class Experiment(scripted):
        def get_trainer(self, **parts: Any) -> Any:
            return Trainer(**parts)

    return Experiment


ASYNCHRONOUS = OWN_DEVICES | {
    "algorithm": {"use_kl_loss": False, "off_policy_correction": {"tis_ratio_type": "token"}},
    "fully_async": {"enabled": True, "max_staleness_steps": 2},
    "epochs": 4,
}


@pytest.mark.parametrize(
    ("max_restarts", "pause"),
    [*(pytest.param(2, pause, marks=pytest.mark.full) for pause in ("keep", "wait")), (0, "keep")],
)
async def test_asynchronous_run_survives_engine_crash_during_sync(
    max_restarts, pause, start_run_with_ray, scripted_experiment, prompt, tmp_path: Path
):
    """Groups run meanwhile: all of them end, and the run trains each sample once, or ends with the engine's name."""
    trainer_settings = ASYNCHRONOUS | {"fully_async": ASYNCHRONOUS["fully_async"] | {"pause": pause}}
    generator = GENERATOR | {"max_engine_restarts": max_restarts}
    experiment = with_slow_weights(asynchronously(scripted_experiment))
    own_script = [script(prompt)[0]] * 4
    changes: dict[str, Any] = {"trainer": trainer_settings, "generator": generator, "experiment": experiment}
    async with start_run_with_ray(tmp_path, own_script, **changes) as trainer:
        client = trainer.inference_engine_client
        at(trainer, "train_policy", lambda: at(client, "pause_generation", killer(trainer, 1), seconds=0.3))
        async with asyncio.timeout(200):
            if max_restarts == 0:
                with pytest.raises(WorkerError, match=r"generator\.max_engine_restarts=0"):
                    await trainer.train()
                return
            await trainer.train()
    rows = RunFolder(tmp_path).read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert sum(row["engines/restarts"] for row in rows) == 1
    assert all(row["async/staleness_max"] <= 2 for row in rows)
    steps = [RunFolder(tmp_path).read_trajectories(step, "train") for step in range(1, 5)]
    samples = Counter((row["uid"].partition("#")[0], row["sample"]) for step in steps for row in step)
    assert len(samples) == 16 and set(samples.values()) == {4}


def lying(make_engine: Callable[[], Any], lie: str) -> InferenceEngineInterface:
    """An engine that treats version 1 of its weights so. (Lost buckets and swapped tensors: the conformance kit.)"""
    engine = make_engine()
    finish, load_lora = engine.finish_weight_update, engine.load_lora

    async def lying_finish(version: int) -> WeightReport:
        report = await finish(version)
        if version == 1 and lie == "computes with others":  # what was reported is right, what is used is not
            import torch

            with torch.inference_mode():
                for parameter in engine._weights._parameters.values():
                    parameter.mul_(1.5)
        return report

    async def lying_load(request: LoraLoadRequest) -> WeightReport:
        if request.version == 1 and lie == "keeps a stale adapter":
            request = replace(request, path=str(Path(request.path).with_name("0")))
        return await load_lora(request)

    engine.finish_weight_update, engine.load_lora = lying_finish, lying_load
    return engine


@pytest.mark.parametrize(
    "lie, message",
    [
        ("keeps a stale adapter", r"base_model\.model"),
        ("computes with others", r"engine 0 gives other log-probs than the trainer: they differ by .* on average"),
    ],
)
async def test_engine_without_weights_ends_run(lie, message, start_run, prompt, monkeypatch, tmp_path: Path):
    trainer_changes: dict[str, Any] = {**LEARNS, "placement": {"colocate_all": True}}
    generator = GENERATOR | {"num_inference_engines": 1, "weight_transfer_threshold_cuda_ipc_GB": 4e-5}
    if "adapter" in lie:
        trainer_changes["policy"] = {"model": {"lora": {"rank": 4}}, "optimizer_config": {"lr": 1e-2}}
        generator |= {"weight_sync_strategy": "adapter"}
    factory = entry.build_engine_factory
    monkeypatch.setattr(entry, "build_engine_factory", lambda *a, **k: partial(lying, factory(*a, **k), lie))
    async with start_run(tmp_path, script(prompt), trainer=trainer_changes, generator=generator) as trainer:
        with pytest.raises(WeightSyncError, match=message):
            await trainer.train()
        assert trainer.global_step == 1, "version 0 went well"
