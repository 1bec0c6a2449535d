"""Adapters of all engines of a client, whichever of them die meanwhile."""

import asyncio
from pathlib import Path

from safetensors import safe_open

from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient
from skyrl_train.inference_engines.supervision import EngineFailure
from skyrl_train.weight_sync.base import LoraLoadRequest


class SteadyAdapters:
    """Loads and unloads adapters in every engine; waits for restarting engines.

    Args:
        client: its engines must not receive adapters from other code
        takes_head: the engines compute adapters of the output layer
    """

    def __init__(self, client: InferenceEngineClient, *, takes_head: bool):
        self._client, self._takes_head = client, takes_head

    async def load_lora(self, request: LoraLoadRequest) -> None:
        """
        Raises:
            ValueError, WeightSyncError: it cannot be loaded.
            WorkerError: engines failed more often than they may.
        """
        if not self._takes_head:
            await asyncio.to_thread(_check_head, Path(request.path))
        while True:
            await self._client.wait_until_healthy()
            try:
                await self._client.load_lora(request)
            except EngineFailure:  # as often as engines may be started again
                continue
            return

    async def unload_lora(self, name: str) -> None:
        """
        Raises:
            WorkerError: engines failed more often than they may.
        """
        await self._client.wait_until_healthy()
        try:
            await self._client.unload_lora(name)
        except EngineFailure:  # the others did, and the next one begins without it
            await self._client.wait_until_healthy()


def _check_head(folder: Path) -> None:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
        of_head = any("lm_head" in name for name in tensors.keys())  # noqa: SIM118
    if of_head:
        raise ValueError(
            "the weights of this sampler change the output layer (lora_config.train_unembed), for which this "
            "server's engines do not support adapters; train with train_unembed=false, or serve with "
            "generator.backend=native"
        )
