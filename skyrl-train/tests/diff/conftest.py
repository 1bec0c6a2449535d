"""One tiny run that all comparisons share, and what makes others of it."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry, EngineTraits, register_engine
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

NUM_STEPS = 8
"""Two epochs."""

Changes = dict[str, Any]


class DifferentCharacters(BaseTextEnv):
    """The share of different characters in the answer, times the row's `worth`."""

    def __init__(self, env_config: Any = None, extras: Any = None):
        super().__init__()
        self.worth = (extras or {}).get("worth", 1.0)

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = self.worth * len(set(action)) / max(1, len(action))
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


class EarlyCharacters(DifferentCharacters):
    """The same, of the first half of the answer."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return super().step(action[: len(action) // 2 + 1])


class CoarseEngine(NativeInferenceEngine):
    """The native engine with log-probs of 12 binary digits less."""

    async def generate(self, input_batch: Any) -> Any:
        output = await super().generate(input_batch)
        log_probs = output.get("response_logprobs")
        if log_probs is not None:
            output["response_logprobs"] = [[round(value * 2048) / 2048 for value in row] for row in log_probs]
        return output


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    skyrl_gym.register(id="different_characters", entry_point=DifferentCharacters)
    skyrl_gym.register(id="early_characters", entry_point=EarlyCharacters)
    register_engine("coarse", requires=EngineTraits(is_in_process=True))(CoarseEngine)
    yield
    EngineRegistry.unregister("coarse")
    skyrl_gym.deregister("different_characters")
    skyrl_gym.deregister("early_characters")


def rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"write {i}"}], "data_source": "toy"} for i in range(16)]


def write_rows(path: Path, data: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in data))
    return str(path)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Changes:
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


@pytest.fixture(scope="module")
def settings(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SkyRLConfig]:
    """`settings(run_dir, changes)`: steps of four prompts with four answers each and two optimizer steps."""
    base: Changes = {
        "data": {"train_data": [write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows())], "val_data": []},
        "environment": {"env_class": "different_characters"},
        "trainer": {
            "policy": {"model": {"path": chat_model}, "optimizer_config": {"lr": 1e-3}},
            "placement": {"device": "cpu", "launcher": "inline"},
            "bf16": False,
            "epochs": 2,
            "train_batch_size": 4,
            "policy_mini_batch_size": 2,
            "micro_train_batch_size_per_gpu": 4,
            "micro_forward_batch_size_per_gpu": 4,
            "max_training_steps": NUM_STEPS,
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

    def make(run_dir: Path, changes: Mapping[str, Any]) -> SkyRLConfig:
        return SkyRLConfig.from_dict(merged(merged(base, {"trainer": {"run_dir": str(run_dir)}}), changes))

    return make


@pytest.fixture(scope="module")
def train(settings: Callable[..., SkyRLConfig]) -> Callable[..., Path]:
    """`train(run_dir, changes, experiment)`: trains to the end; the run folder."""

    def run(run_dir: Path, changes: Mapping[str, Any] = {}, experiment: Any = BasePPOExp) -> Path:
        experiment(settings(run_dir, changes)).run()
        return run_dir

    return run


@pytest.fixture(scope="module")
def base_run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("base") / "run")


@pytest.fixture
def copy(base_run: Path, tmp_path: Path) -> Path:
    """A copy of the base run's folder, to plant something in."""
    return Path(shutil.copytree(base_run, tmp_path / "copy"))


def edit_lines(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """ChangedItem every object of a file of JSON lines."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for row in found:
        edit(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


@pytest.fixture(scope="module", name="edit_lines")
def make_edit_lines() -> Any:
    return edit_lines


@pytest.fixture(scope="module", name="write_rows")
def make_write_rows() -> Any:
    return write_rows


@pytest.fixture(scope="module", name="rows")
def make_rows() -> Any:
    return rows
