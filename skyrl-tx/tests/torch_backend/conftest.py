"""Tiny models of each architecture, in folders as their owners would publish them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tx.tinker.types import Datum

VOCAB = 67
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
)

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "qwen2": lambda: Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=20),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=18,
        mlp_only_layers=[1],
    ),
    "phi3": lambda: Phi3Config(**_COMMON),  # q, k and v in one layer, gate and up in another
    "sliding": lambda: Qwen3Config(
        **_COMMON, head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny model of an architecture."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            torch.manual_seed(len(name))
            model = AutoModelForCausalLM.from_config(CONFIGS[name]())
            with torch.no_grad():
                for parameter in model.parameters():  # weights large enough for numbers to differ
                    if parameter.dim() > 1:
                        parameter.mul_(6)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="session")
def supervised() -> Callable[..., list[Datum]]:
    """Random data for `cross_entropy`, of given lengths."""

    def make(lengths: list[int], seed: int = 0) -> list[Datum]:
        random = np.random.default_rng(seed)
        data = []
        for length in lengths:
            tokens = random.integers(VOCAB, size=length + 1)
            weights = random.normal(size=length).astype(np.float32)
            data.append(Datum(tokens[:-1], {"target_tokens": tokens[1:], "weights": weights}))
        return data

    return make
