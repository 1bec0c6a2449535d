"""Tiny model that all engines support and that is recomputed in milliseconds."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = ["<pad>", "<eos>", *_LETTERS, *(f"{letter}." for letter in "abcdefghijklmnopqrstuvwxyz")]


def make_tiny_model(folder: str | Path, *, tied: bool, seed: int = 0) -> str:
    """A Qwen3 of two layers and 64 words with random weights, and a tokenizer, as a folder.

    Args:
        tied: one matrix for input and output embeddings; both kinds exist, and weight updates differ.

    Returns: the folder.
    """
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention has for CPUs
        max_position_embeddings=1024,
        initializer_range=0.12,  # far from uniform, so that answers do not hang on rounding
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    # Joins words as they are; libraries of constrained answers read the bytes of words by the kind of the decoder.
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)
