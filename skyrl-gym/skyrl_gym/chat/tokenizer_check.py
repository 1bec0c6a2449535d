"""Check that a tokenizer keeps text and fits its model, before a run spends time on prompts without content."""

from typing import Any

_NUM_PROBES = 50
"""Approximate number of vocabulary words that the text of the check contains."""


def find_tokenizer_fault(tokenizer: Any, vocab_size: int | None = None) -> str | None:
    """Return why a tokenizer of transformers cannot be used, or None.

    Args:
        vocab_size: of the model, which has embeddings for this number of ids; None: unknown.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    ids = sorted(set(vocabulary.values()) - set(tokenizer.all_special_ids))
    words = {tokenizer.decode([id]).strip() for id in ids[:: max(1, len(ids) // _NUM_PROBES)]}
    text = " ".join(sorted(word for word in words if word and word.isprintable()))
    num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    if loses_text(text, num_tokens):
        return (
            f"{type(tokenizer).__name__} loses text: {text[:40]!r} of its own vocabulary becomes {num_tokens} tokens. "
            "transformers picks a tokenizer's class by model_type in config.json: save a tokenizer of that class"
        )
    beyond = {word: id for word, id in vocabulary.items() if vocab_size is not None and id >= vocab_size}
    if not beyond:
        return None
    # Tokens that were added for other models of the family (images) may have no embedding; they are never read.
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    named = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    template = str(tokenizer.chat_template or "")
    outside = [word for word, id in beyond.items() if word not in added or id in named or word in template]
    if not outside:
        return None
    return (
        f"{len(outside)} tokens of {type(tokenizer).__name__}, such as {outside[0]!r}, have ids of the model's "
        f"vocab_size={vocab_size} or above, and so no embedding: use this model's tokenizer, or resize its embeddings"
    )


def loses_text(text: str, num_tokens: int) -> bool:
    """Return whether a text of several words has become at most one token."""
    return num_tokens <= 1 and len(text.split()) > 3
