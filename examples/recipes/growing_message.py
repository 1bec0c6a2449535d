"""Tiny models of miniatures with one growing assistant message (`use_conversation_multi_turn=false`): what the model
writes and what the environment answers, in turn. Knows no recipe.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from miniatures import IGNORED, Messages, warm_up
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, END, START, UNKNOWN = "<|pad|>", "<|im_end|>", "<|im_start|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COPY_SCALE = 0.3
HEAD_DIM = 32
"""The smallest that every engine has kernels for."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt and what follows, piece by piece: text, and whether the model learns to write it."""

    prompt: Messages
    pieces: Sequence[tuple[str, bool]]


def phrase_tokenizer(phrases: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the given phrases, the longest first, and single printable characters.

    Texts that are the same in every row (instructions, tags, the frame around a document) are one token each. A phrase
    that ends in "…" covers the rest of its line: one unknown token, for lines that differ from run to run.
    """
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    whole = [phrase for phrase in dict.fromkeys([END, START, *roles, *phrases]) if not phrase.endswith("…")]
    rest_of_line = [re.escape(phrase[:-1]) + r"[^\n]*" for phrase in phrases if phrase.endswith("…")]
    symbols = list(dict.fromkeys([PAD, END, START, UNKNOWN, *whole, "\n", *map(chr, range(32, 127))]))
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=UNKNOWN))
    longest_first = [re.escape(phrase) for phrase in sorted(whole, key=len, reverse=True)]
    pattern = Regex("|".join([*rest_of_line, *longest_first, r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model(tokenizer: PreTrainedTokenizerBase, hidden_size: int, num_layers: int, seed: int) -> Qwen3ForCausalLM:
    """Make an untrained Qwen3-architecture model for sequences of up to 512 tokens.

    Attention is initialized to copy: attended values are added unchanged to the residual stream, so that a warm-up of a
    few hundred steps only has to learn where to attend.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=cast(int, tokenizer.eos_token_id),
        pad_token_id=cast(int, tokenizer.pad_token_id),
        bos_token_id=None,
        initializer_range=hidden_size**-0.5,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        _begin_as_copy(layer.self_attn)
    return model


@torch.no_grad()
def _begin_as_copy(attention: Any) -> None:
    """Let each key-value head carry its share of the input's dimensions, and the first of its query heads add them."""
    value, output = attention.v_proj.weight, attention.o_proj.weight  # [heads x 32, H], [H, query heads x 32]
    torch.nn.init.eye_(value)
    group = output.shape[1] // value.shape[0]
    for dimension in range(min(value.shape)):
        head, offset = divmod(dimension, HEAD_DIM)
        output[dimension, head * group * HEAD_DIM + offset] += COPY_SCALE


def encode_growing_message(
    tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration
) -> tuple[list[int], list[int]]:
    """Return ids [T] and labels [T] of a demonstration, each piece encoded by itself as in a rollout; the label of what
    the model does not write is `IGNORED`."""
    cached = _pieces_of(tokenizer)
    ids: list[int] = []
    for message in demonstration.prompt:
        ids += cached(f"{START}{message['role']}\n{message['content']}{END}\n")
    ids = [*ids, *cached(f"{START}assistant\n")]
    labels = [IGNORED] * len(ids)
    for text, learned in demonstration.pieces:
        piece = cached(text)
        ids += piece
        labels += piece if learned else [IGNORED] * len(piece)
    return ids, labels


@cache
def _pieces_of(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return the encoder of pieces of text, which remembers them: demonstrations repeat theirs."""
    return cache(lambda text: tokenizer.encode(text, add_special_tokens=False))


def prepare_model(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    demonstrate: Callable[[random.Random], Demonstration],
    *,
    hidden_size: int,
    num_layers: int,
    seed: int,
    **warm_up_settings: Any,
) -> Path:
    """Make a model and warm it up, unless the folder has it. Returns: the folder, which transformers can load."""
    if not (folder / "config.json").exists():
        model = tiny_model(tokenizer, hidden_size, num_layers, seed)
        print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens: {folder}", flush=True)
        warm_up(model, tokenizer, demonstrate, encode=encode_growing_message, seed=seed, **warm_up_settings)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder
