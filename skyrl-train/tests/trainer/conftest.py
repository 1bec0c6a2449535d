"""Settings of a tiny run and an environment that even random weights get some reward from."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add this folder

Changes = dict[str, Any]


class ManyDifferentCharacters(BaseTextEnv):
    """The share of different characters in the answer: something even random weights get some of."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class UpToThreeTurns(BaseTextEnv):
    """Talks on as long as the answer has an even number of characters; each turn earns its share of different ones."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()
        self.num_turns = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.num_turns += 1
        done = len(action) % 2 == 1 or self.num_turns == 3
        observations = [] if done else [{"role": "user", "content": "go on"}]
        reward = len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=observations, reward=reward, done=done, metadata={})


ENVIRONMENTS = {"many_different_characters": ManyDifferentCharacters, "up_to_three_turns": UpToThreeTurns}


@pytest.fixture(scope="session")
def environments() -> Iterator[None]:
    for name, env in ENVIRONMENTS.items():
        skyrl_gym.register(id=name, entry_point=env)
    yield
    for name in ENVIRONMENTS:
        skyrl_gym.deregister(name)


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"write {i}"}], "data_source": "toy"} for i in range(16)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def merged(base: Changes, changes: Changes) -> Changes:
    """`base` with `changes`, section by section."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


@pytest.fixture(scope="session", name="merged")
def make_merged() -> Callable[[Changes, Changes], Changes]:
    return merged


@pytest.fixture(scope="session")
def settings(chat_model: str, prompts: str, environments: None) -> Callable[[Path, Changes], SkyRLConfig]:
    """`settings(run_dir, changes)`: two steps of four prompts, four answers each, two optimizer steps a step."""
    base: Changes = {
        "data": {"train_data": [prompts], "val_data": []},
        "environment": {"env_class": "many_different_characters"},
        "trainer": {
            "policy": {"model": {"path": chat_model}, "optimizer_config": {"lr": 1e-3}},
            "placement": {"device": "cpu", "launcher": "inline"},
            "bf16": False,
            "train_batch_size": 4,
            "policy_mini_batch_size": 2,
            "micro_train_batch_size_per_gpu": 4,
            "micro_forward_batch_size_per_gpu": 4,
            "max_training_steps": 2,
            "max_prompt_length": 64,
            "ckpt_interval": -1,
            "eval_interval": -1,
            "algorithm": {"use_kl_loss": False},
        },
        "generator": {
            "model_dtype": "float32",
            "n_samples_per_prompt": 4,
            "sampling_params": {"max_generate_length": 12},
        },
    }

    def make(run_dir: Path, changes: Changes) -> SkyRLConfig:
        return SkyRLConfig.from_dict(merged(merged(base, {"trainer": {"run_dir": str(run_dir)}}), changes))

    return make


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Callable[[SkyRLConfig], list[dict[str, float]]]:
    """`run(cfg)`: trains to the end; the metrics of each step. Ray starts when a run first asks for it."""

    def train(cfg: SkyRLConfig) -> list[dict[str, float]]:
        if cfg.trainer.placement.launcher == "ray":
            request.getfixturevalue("ray_cpu")
        BasePPOExp(cfg).run()
        return RunFolder(cfg.trainer.run_dir).read_metrics()

    return train
