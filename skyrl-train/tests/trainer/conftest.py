"""Settings of a tiny run, and environments for it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_gym.envs.base_text_env import BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.utils.run_folder import RunFolder
from skyrl_train_testing.tiny_runs import (
    DifferentCharacters,
    make_tiny_run,
    merge_settings,
    register_environments,
    write_prompts,
)

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not add this folder

Changes = dict[str, Any]


class UpToThreeTurns(DifferentCharacters):
    """Talks on as long as the answer has an even number of characters; each turn earns its share of different ones."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = len(action) % 2 == 1 or self.turns == 3
        observations = [] if done else [{"role": "user", "content": "go on"}]
        return BaseTextEnvStepOutput(observations=observations, reward=self.reward(action), done=done, metadata={})


@pytest.fixture(autouse=True, scope="module")
def one_process_group(group_of_one: None) -> None:
    """The group of all inline runs of a file."""


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prompts(tmp_path_factory.mktemp("data") / "prompts.jsonl")


@pytest.fixture(scope="session", name="merged")
def make_merged() -> Callable[[Changes, Changes], Changes]:
    return merge_settings


@pytest.fixture(scope="session")
def settings(chat_model: str, prompts: str) -> Iterator[Callable[[Path, Changes], SkyRLConfig]]:
    """`settings(run_dir, changes)`: of a `tiny_run`."""
    with register_environments(different_characters=DifferentCharacters, up_to_three_turns=UpToThreeTurns):
        yield lambda run_dir, changes: SkyRLConfig.from_dict(make_tiny_run(run_dir, chat_model, prompts, changes))


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Callable[[SkyRLConfig], list[dict[str, float]]]:
    """`run(cfg)`: trains to the end; the metrics of each step. Ray starts when a run first asks for it."""

    def train(cfg: SkyRLConfig) -> list[dict[str, float]]:
        if cfg.trainer.placement.launcher == "ray":
            request.getfixturevalue("ray_cpu")
        BasePPOExp(cfg).run()
        return RunFolder(cfg.trainer.run_dir).read_metrics()

    return train
