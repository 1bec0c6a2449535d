"""Adapters as folders, and sampling of the tiny model with a deadline on everything."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tx.tinker.backends.torch.sampling import NativeSampling

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
SamplingOf = Callable[..., AbstractAsyncContextManager[NativeSampling]]


@pytest.fixture(scope="session")
def sampling_of(tiny_model: Path) -> SamplingOf:
    """`async with sampling_of(max_num_seqs=4) as sampling`."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[NativeSampling]:
        sampling = NativeSampling(tiny_model, **settings)
        await sampling.start()
        try:
            yield sampling
        finally:
            await sampling.close()

    return make


@pytest.fixture
async def sampling(sampling_of: SamplingOf) -> AsyncIterator[NativeSampling]:
    async with sampling_of() as sampling:
        yield sampling


@pytest.fixture(scope="session")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a folder with a random adapter of the tiny model, scaled so that it changes completions."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    made: dict[tuple[Any, ...], Path] = {}

    def make(seed: int = 0, *, rank: int = 8, layers: tuple[str, ...] = tuple(EVERYTHING), b: float = 0.1) -> Path:
        key = seed, rank, layers, b
        if key not in made:
            generator = torch.Generator().manual_seed(seed)
            tensors = {}
            for name, module in model.named_modules():
                if name.rpartition(".")[2] in layers:
                    a = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
                    tensors[f"base_model.model.{name}.lora_A.weight"] = a
                    tensors[f"base_model.model.{name}.lora_B.weight"] = (
                        torch.randn(module.out_features, rank, generator=generator) * b
                    )
            folder = tmp_path_factory.mktemp("adapter")
            LoraConfig(
                r=rank, lora_alpha=32, target_modules=list(layers), task_type="CAUSAL_LM", inference_mode=True
            ).save_pretrained(str(folder))
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
            made[key] = folder
        return made[key]

    return make
