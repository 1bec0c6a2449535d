"""The facts of a model that most tests check against."""

from pathlib import Path

import pytest

from tx.tinker.base_model import BaseModelFacts


@pytest.fixture
def facts() -> BaseModelFacts:
    """A vocabulary of 100, a context of 16."""
    return BaseModelFacts(
        name="tiny",
        folder=Path("tiny"),
        vocab_size=100,
        max_context=16,
        architecture="Qwen3ForCausalLM",
        tied_embeddings=False,
        tokenizer_id=None,
    )
