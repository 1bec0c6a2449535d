"""Tiny random language models on disk, one of each architecture, with a tokenizer of 62 letters, digits and pairs."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

sys.path.insert(0, str(Path(__file__).parent))  # native_runs: importlib mode does not add this folder

VOCABULARY = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789", *(f"{c}." for c in "abcdefghijklmnopqrstuvwx")]
_SHAPE = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # far from uniform, so that greedy answers do not hang on rounding
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "qwen2": lambda: Qwen2Config(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "qwen2_window": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=20, layer_types=["sliding_attention", "full_attention"]
    ),
}


def _letters_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a tiny random model by the name of its architecture; made once."""
    made: dict[str, str] = {}

    def make(name: str) -> str:
        if name not in made:
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp(name)
            AutoModelForCausalLM.from_config(_CONFIGS[name]()).save_pretrained(folder)
            _letters_tokenizer().save_pretrained(folder)
            made[name] = str(folder)
        return made[name]

    return make


@pytest.fixture(scope="session")
def stories260k(test_data: Path) -> str:
    """The folder of a real, trained Llama of 260 thousand parameters that writes children's stories."""
    folder = test_data / "tiny_lm" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"the stories260K model is not at {folder}")
    return str(folder)
