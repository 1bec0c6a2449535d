"""Trained adapters of the tiny model, and sampling of it by engines in this process."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the helpers in this folder; importlib mode does not

from engines_of_tests import Engines, trained_adapter

from skyrl_train.inference_engines.native.loading import load_tokenizer
from tx.tinker.backends.torch.training import TorchTraining

EnginesOf = Callable[..., AbstractAsyncContextManager[Engines]]


@pytest.fixture(scope="session")
def engines_of(tiny_model: Path) -> EnginesOf:
    """`async with engines_of(num_engines=2, max_loaded_adapters=1) as engines`."""
    tokenizer = load_tokenizer(str(tiny_model), trust_remote_code=False)

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[Engines]:
        engines = Engines(tiny_model, tokenizer, **settings)
        await engines.sampling.start()
        try:
            yield engines
        finally:
            await engines.sampling.close()

    return make


@pytest.fixture(scope="session")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of an adapter that has learnt something: `adapter(seed, train_mlp=False)`."""
    training = TorchTraining(tiny_model, device="cpu")
    made: dict[Any, Path] = {}

    def folder(seed: int = 0, **lora: bool) -> Path:
        key = seed, *lora.items()
        if key not in made:
            made[key] = tmp_path_factory.mktemp("adapter")
            trained_adapter(training, made[key], seed, **({"train_unembed": False} | lora))
        return made[key]

    return folder
