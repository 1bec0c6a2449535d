"""A tiny run of the real thing: a two-layer model that writes characters, in this process or in those of Ray."""

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.trainer import RayPPOTrainer
from skyrl_train_testing.tiny_runs import DifferentCharacters, make_tiny_run, register_environments, write_prompts


class OneTurn(DifferentCharacters):
    """Environment that gives every response the reward 0.5."""

    def reward(self, action: str) -> float:
        return 0.5


class RaisesInFirstStep(OneTurn):
    """Environment whose first episode raises, whose second earns 1, the others nothing."""

    episodes: "itertools.count[int]"

    def reward(self, action: str) -> float:
        number = next(type(self).episodes)
        if number == 0:
            raise ConnectionResetError("the sandbox hung up")
        return 1.0 if number == 1 else 0.0


class RaisesInInit(OneTurn):
    def init(self, prompt: Any) -> Any:
        raise KeyError("ground_truth")


class Hangs(OneTurn):
    released: threading.Event

    def reward(self, action: str) -> float:
        type(self).released.wait(60)
        return 1.0


class NotANumber(OneTurn):
    def reward(self, action: str) -> float:
        return float("nan")


@pytest.fixture(scope="session")
def environments() -> Iterator[None]:
    """Register an environment for each kind of failure."""
    RaisesInFirstStep.episodes = itertools.count()
    Hangs.released = threading.Event()
    with register_environments(
        works=OneTurn,
        different_characters=DifferentCharacters,
        raises_in_first_step=RaisesInFirstStep,
        raises_in_init=RaisesInInit,
        hangs=Hangs,
        not_a_number=NotANumber,
    ):
        yield
    Hangs.released.set()


class ScriptedTrainer(RayPPOTrainer):
    """The real trainer on prompts that the test names, and with a look at its last batch."""

    script: list[list[dict[str, Any]]]

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        yield from self.script

    def compute_advantages_and_returns(self, batch: Any) -> Any:
        self.last_batch = super().compute_advantages_and_returns(batch)
        return self.last_batch


class ScriptedExperiment(BasePPOExp):
    """The real experiment, whose prompts are the trainer's script."""

    trainer = ScriptedTrainer

    def get_trainer(self, **parts: Any) -> ScriptedTrainer:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.trainer(**parts)


def prompt(env_class: str, content: str = "1+1=") -> dict[str, Any]:
    """A prompt as the dataloader gives it."""
    return {
        "prompt": [{"role": "user", "content": content}],
        "env_class": env_class,
        "env_extras": {},
        "uid": f"{env_class} {content[:8]}",
    }


def settings(model: str, folder: Path, launcher: str, num_prompts: int, changes: dict[str, Any]) -> SkyRLConfig:
    """Settings of a run of `num_prompts` prompts a step, four samples each, one optimizer step."""
    own = {
        "environment": {"env_class": "works", "skyrl_gym": {"env_timeout_seconds": 1.0}},
        "trainer": {
            "policy": {"optimizer_config": {"lr": 1e-6}},
            "placement": {"launcher": launcher},
            "train_batch_size": num_prompts,
            "policy_mini_batch_size": num_prompts,
            "micro_forward_batch_size_per_gpu": 8,
            "max_training_steps": None,
            "max_prompt_length": 40,
            "worker_timeout_seconds": 120,
        },
        "generator": {
            "max_num_seqs": 32,
            "sampling_params": {"max_generate_length": 8},
            "request_timeout_seconds": 60,
        },
    }
    prompts = write_prompts(folder / "prompts.jsonl", num_prompts)
    return SkyRLConfig.from_dict(make_tiny_run(folder, model, prompts, own, changes))


StartRun = Callable[..., AbstractAsyncContextManager[ScriptedTrainer]]


def make_start_run(model: str, launcher: str) -> StartRun:
    @contextlib.asynccontextmanager
    async def start(
        folder: Path,
        script: list[list[dict[str, Any]]],
        experiment: type[ScriptedExperiment] = ScriptedExperiment,
        **changes: dict[str, Any],
    ) -> AsyncIterator[ScriptedTrainer]:
        cfg = settings(model, folder, launcher, len(script[0]), changes)
        trainer = await experiment(cfg)._setup_trainer()
        assert isinstance(trainer, ScriptedTrainer)
        trainer.script = script
        trainer.total_training_steps = len(script)
        try:
            yield trainer
        finally:
            await trainer.shutdown()

    return start


@pytest.fixture(scope="session")
def start_run(environments: None, chat_model: str) -> StartRun:
    """`async with start_run(folder, script, **changes) as trainer`: a run with its models up, in this process."""
    return make_start_run(chat_model, "inline")


@pytest.fixture(scope="session")
def start_run_with_ray(ray_cpu: None, environments: None, chat_model: str) -> StartRun:
    """Start such a run with its processes, and end them afterwards: for tests that harm processes."""
    return make_start_run(chat_model, "ray")


@pytest.fixture(scope="session", name="prompt")
def make_prompt() -> Callable[..., dict[str, Any]]:
    return prompt


@pytest.fixture(scope="session")
def scripted_experiment() -> type[ScriptedExperiment]:
    """Make an experiment for tests that replace a part of it."""
    return ScriptedExperiment
