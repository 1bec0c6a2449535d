"""A tiny model with random weights, in an engine of this process and behind a real endpoint."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads of one process fight over two cores

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2] / "skyrl-tx" / "tests")]  # for helpers; importlib mode does not

WORDS = ["user", "assistant", "system", "tool"]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from skyrl_train_testing.tiny_models import build_character_tokenizer, build_tiny_qwen3

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "agent"
    tokenizer = build_character_tokenizer(added_tokens=WORDS)
    tokenizer.save_pretrained(folder)
    build_tiny_qwen3(
        hidden_size=32, scale=3.0, vocab_size=len(tokenizer), max_position_embeddings=4096
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(chat_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(chat_model)


@pytest.fixture(scope="session")
def engine(chat_model: Path) -> Iterator[Any]:
    from skyrl_train.inference_engines.native.engine import NativeInferenceEngine

    engine = NativeInferenceEngine(str(chat_model), dtype="float32")
    yield engine
    asyncio.run(engine.teardown())


@pytest.fixture
async def endpoint(engine: Any, tokenizer: Any) -> AsyncIterator[Any]:
    """skyrl-train's own, with the key `secret`."""
    from skyrl_train.endpoint.server import EndpointServer

    server = EndpointServer(engine, tokenizer, "tiny", api_key="secret")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def slow_agent() -> Iterator[str]:
    """The name of an agent that asks, or sleeps for a long time, as its row's `thing` says."""
    from skyrl_agent.agents.mapping import AGENT_GENERATOR_REGISTRY, AGENT_TRAJECTORY_REGISTRY

    name = "agents_of_tests.Slow"
    AGENT_TRAJECTORY_REGISTRY[name] = _slow_trajectory()
    AGENT_GENERATOR_REGISTRY[name] = "skyrl_agent.agents.base.AgentRunner"
    yield name
    del AGENT_TRAJECTORY_REGISTRY[name], AGENT_GENERATOR_REGISTRY[name]


def _slow_trajectory() -> type[Any]:
    from skyrl_agent.agents.trajectory import BaseTrajectory

    class Slow(BaseTrajectory):
        async def initialize_trajectory(self) -> None: ...

        async def generate_trajectory(self) -> None:
            if self.instance.row["thing"] == "sleeps":
                await asyncio.sleep(600)
            await self.infer_engine.async_generate_ids(input_ids=[1], sampling_params={}, request_id="slow")

        async def evaluate_trajectory(self) -> None: ...

    return Slow
