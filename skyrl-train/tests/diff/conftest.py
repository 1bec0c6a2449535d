"""One tiny run that all comparisons share, and what makes others of it."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config import SkyRLConfig
from skyrl_train.config.engine_kinds import EngineRegistry, EngineTraits, register_engine
from skyrl_train.entrypoints.main_base import BasePPOExp
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from skyrl_train_testing.tiny_runs import DifferentCharacters, make_tiny_run, register_environments

NUM_STEPS = 8
"""Two epochs."""


class WorthCharacters(DifferentCharacters):
    """The share of different characters in the answer, times the row's `worth`."""

    def reward(self, action: str) -> float:
        return self.extras.get("worth", 1.0) * super().reward(action)


class EarlyCharacters(WorthCharacters):
    """The same, of the first half of the answer."""

    def reward(self, action: str) -> float:
        return super().reward(action[: len(action) // 2 + 1])


class CoarseEngine(NativeInferenceEngine):
    """The native engine with log-probs of 12 binary digits less."""

    async def generate(self, request: Any) -> Any:
        completion = await super().generate(request)
        if completion.log_probs is None:
            return completion
        return replace(completion, log_probs=[round(value * 2048) / 2048 for value in completion.log_probs])


@pytest.fixture(scope="module", autouse=True)
def environments_and_engine() -> Iterator[None]:
    with register_environments(different_characters=WorthCharacters, early_characters=EarlyCharacters):
        register_engine("coarse", requires=EngineTraits(is_in_process=True))(CoarseEngine)
        yield
        EngineRegistry.unregister("coarse")


def rows() -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"write {i}"}], "data_source": "toy"} for i in range(16)]


def write_rows(path: Path, data: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in data))
    return str(path)


@pytest.fixture(scope="module")
def train(chat_model: str, group_of_one: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`train(run_dir, changes, experiment)`: trains to the end; the run folder."""
    prompts = write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", rows())
    longer = {"trainer": {"epochs": 2, "max_training_steps": NUM_STEPS}, "generator": {"n_samples_per_prompt": 2}}

    def run(run_dir: Path, changes: Mapping[str, Any] = {}, experiment: Any = BasePPOExp) -> Path:
        experiment(SkyRLConfig.from_dict(make_tiny_run(run_dir, chat_model, prompts, longer, changes))).run()
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
