"""A tiny run of the real thing: a two-layer model that writes characters, in this process or in those of Ray."""

import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.trainer import RayPPOTrainer


class OneTurn(BaseTextEnv):
    """Environment of one turn that gives every response the reward 0.5."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=self.reward(), done=True, metadata={})

    def reward(self) -> float:
        return 0.5


class RaisesInFirstStep(OneTurn):
    """Environment whose first episode raises, whose second earns 1, the others nothing."""

    episodes: "itertools.count[int]"

    def reward(self) -> float:
        number = next(type(self).episodes)
        if number == 0:
            raise ConnectionResetError("the sandbox hung up")
        return 1.0 if number == 1 else 0.0


class RaisesInInit(OneTurn):
    def init(self, prompt: Any) -> Any:
        raise KeyError("ground_truth")


class Hangs(OneTurn):
    released: threading.Event

    def reward(self) -> float:
        type(self).released.wait(60)
        return 1.0


class ManyCharacters(OneTurn):
    """Environment whose reward is the share of different characters in a response."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class NotANumber(OneTurn):
    def reward(self) -> float:
        return float("nan")


@pytest.fixture(scope="session")
def environments() -> Iterator[None]:
    """Register an environment for each kind of failure."""
    RaisesInFirstStep.episodes = itertools.count()
    Hangs.released = threading.Event()
    for name, env in {
        "works": OneTurn,
        "many_characters": ManyCharacters,
        "raises_in_first_step": RaisesInFirstStep,
        "raises_in_init": RaisesInInit,
        "hangs": Hangs,
        "not_a_number": NotANumber,
    }.items():
        skyrl_gym.register(id=name, entry_point=env)
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


def write_prompts(path: Path, prompts: list[dict[str, Any]]) -> None:
    """A dataset of these prompts, cut to a length that the trainer takes."""
    rows = [{"prompt": [{"role": "user", "content": row["prompt"][0]["content"][:8]}]} for row in prompts]
    path.write_text("\n".join(json.dumps(row) for row in rows))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, section by section."""
    sections = {
        name: merged(base[name], changes[name])
        for name in base
        if isinstance(changes.get(name), dict) and isinstance(base[name], dict)
    }
    return base | changes | sections


def settings(model: str, run_dir: Path, num_prompts: int, changes: dict[str, dict[str, Any]]) -> SkyRLConfig:
    """Settings of a run of `num_prompts` prompts a step, four samples each, one optimizer step."""
    trainer = {
        "policy": {"model": {"path": model}},
        "run_dir": str(run_dir),
        "train_batch_size": num_prompts,
        "policy_mini_batch_size": num_prompts,
        "micro_train_batch_size_per_gpu": 4,
        "micro_forward_batch_size_per_gpu": 8,
        "max_prompt_length": 40,
        "bf16": False,
        "gradient_checkpointing": False,
        "algorithm": {"use_kl_loss": False},
        "eval_interval": 0,
        "ckpt_interval": 0,
        "print_example_interval": 0,
        "worker_timeout_seconds": 120,
    }
    generator = {
        "model_dtype": "float32",
        "n_samples_per_prompt": 4,
        "max_num_seqs": 32,
        "sampling_params": {"max_generate_length": 8},
        "request_timeout_seconds": 60,
    }
    sections = {
        "data": {"train_data": [str(run_dir / "prompts.jsonl")]},
        "trainer": merged(trainer, changes.get("trainer", {})),
        "generator": merged(generator, changes.get("generator", {})),
        "environment": {"env_class": "works", "skyrl_gym": {"env_timeout_seconds": 1.0}},
    }
    return SkyRLConfig.from_dict(sections)


StartRun = Callable[..., AbstractAsyncContextManager[ScriptedTrainer]]


def make_start_run(model: str, launcher: str) -> StartRun:
    @contextlib.asynccontextmanager
    async def start(
        folder: Path,
        script: list[list[dict[str, Any]]],
        experiment: type[ScriptedExperiment] = ScriptedExperiment,
        **changes: dict[str, Any],
    ) -> AsyncIterator[ScriptedTrainer]:
        write_prompts(folder / "prompts.jsonl", script[0])
        with_launcher = merged({"trainer": {"placement": {"launcher": launcher}}}, changes)
        cfg = settings(model, folder, len(script[0]), with_launcher)
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
