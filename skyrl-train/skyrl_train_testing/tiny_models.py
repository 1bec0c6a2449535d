"""Tiny real things for tests of whatever takes a model: a tokenizer of one token a character, a random Qwen3."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


def build_character_tokenizer(
    chat_template: str = CHAT_TEMPLATE, *, start: str = "<start>", end: str = "<end>", added_tokens: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Make a tokenizer of characters: 0 `<pad>`, 1 `end` (the end of a sequence), 2 `start`, newline and printable
    ASCII (99 in all), and those added."""
    symbols = ["<pad>", end, start, "\n", *map(chr, range(32, 127)), *added_tokens]
    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken(token) for token in added_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=end,
        additional_special_tokens=[start],
        chat_template=chat_template,
    )


def build_tiny_mixture(*, scale: float = 1.0, **config: Any) -> Qwen3MoeForCausalLM:
    """Build two layers of four experts, two active per token, with reproducible random weights.

    Args:
        scale: of all weights, as in `build_tiny_qwen3`.
        config: further fields of `Qwen3MoeConfig`, and overrides of the sizes here.
    """
    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    sizes |= dict(num_experts=4, num_experts_per_tok=2)
    tokens: dict[str, Any] = dict(eos_token_id=1, pad_token_id=0, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(sizes | tokens | config)))
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    return model


def build_tiny_qwen3(*, hidden_size: int, scale: float = 1.0, **config: Any) -> Qwen3ForCausalLM:
    """Build two layers of four heads with reproducible random weights; 0 is padding, 1 ends a sequence.

    Args:
        hidden_size: H; the heads have H / 4 numbers each, the layers between 2 H.
        scale: of all weights. Small random models are almost uniform; 3 gives tokens distinct log-probs.
        config: further fields of `Qwen3Config`, and overrides of the above.
    """
    shape = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**(shape | config)))
    for parameter in model.parameters():
        parameter.data.mul_(scale)
    return model
