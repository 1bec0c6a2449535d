"""The client of skyrl_train over native engines in this process, which tests may end; and training for a moment."""

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from skyrl_train.config import SkyRLConfig
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.native.engine import NativeInferenceEngine
from tx.tinker.backends.base import Failure
from tx.tinker.backends.skyrl_train.sampling import EngineSampling
from tx.tinker.backends.torch.training import TorchTraining
from tx.tinker.types import AdamParams, Datum, LoraSpec, TrainingPass


class Engines:
    """`sampling` over engines that are started again when they end, `max_restarts` times."""

    def __init__(
        self,
        model: Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_engines: int = 1,
        max_num_seqs: int = 8,
        max_loaded_adapters: int = 4,
        max_restarts: int = 3,
        takes_head: bool = True,
    ):
        self._kwargs: dict[str, Any] = {"max_num_seqs": max_num_seqs, "max_loras": max_loaded_adapters}
        self._model = str(model)
        config = SkyRLConfig.from_dict(
            {
                "trainer": {"policy": {"model": {"path": self._model}}},
                "generator": {"max_engine_restarts": max_restarts, "engine_health_interval_seconds": 2.0},
            }
        )
        engines = [self._engine() for _ in range(num_engines)]
        self.client = InferenceEngineClient(engines, tokenizer, config, restart=self._restart)
        self.sampling = EngineSampling(
            self.client,
            max_num_seqs=max_num_seqs * num_engines,
            max_loaded_adapters=max_loaded_adapters,
            takes_head=takes_head,
        )

    async def end(self, index: int = 0) -> None:
        """End an engine as if its process had died."""
        await self.client.engines[index].teardown()

    def _engine(self) -> NativeInferenceEngine:
        return NativeInferenceEngine(self._model, **self._kwargs)

    async def _restart(self, index: int) -> NativeInferenceEngine:
        return self._engine()


def trained_adapter(training: TorchTraining, folder: Path, seed: int, **lora: bool) -> None:
    """Write an adapter of rank 8 after one large step on random tokens."""
    training.create("model", LoraSpec(rank=8, seed=seed, **lora))
    tokens = np.random.default_rng(seed).integers(3, 99, 65)
    datum = Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": np.ones(64, np.float32)})
    [result] = training.run([TrainingPass("model", [datum], "cross_entropy")])
    assert not isinstance(result, Failure)
    training.optim_step("model", AdamParams(learning_rate=0.02))
    training.save("model", folder, state=False)
    training.forget("model")
