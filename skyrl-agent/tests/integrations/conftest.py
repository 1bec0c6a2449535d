"""A tiny model with random weights, in an engine of this process and behind a real endpoint."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads of one process fight over two cores

import pytest

WORDS = ["user", "assistant", "system", "tool"]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    from skyrl_train.testing.tiny_models import character_tokenizer, tiny_qwen3

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models") / "agent"
    tokenizer = character_tokenizer(added_tokens=WORDS)
    tokenizer.save_pretrained(folder)
    tiny_qwen3(hidden_size=32, scale=3.0, vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(
        folder
    )
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
    from skyrl_train.inference_engines.openai_api.server import EndpointServer

    server = EndpointServer(engine, tokenizer, "tiny", api_key="secret")
    await server.start()
    yield server
    await server.stop()
