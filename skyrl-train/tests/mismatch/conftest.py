"""A tiny model whose distributions are far from uniform, so that mistakes show."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="session")
def sharp_model(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The chat model with its matrices six times as large."""
    folder = tmp_path_factory.mktemp("models") / "sharp"
    model = AutoModelForCausalLM.from_pretrained(chat_model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(6.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(chat_model).save_pretrained(folder)
    return str(folder)
