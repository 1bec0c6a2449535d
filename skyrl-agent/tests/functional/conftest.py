"""Real tokenizers with real chat templates, and a model that answers in their spelling."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("repeatable", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def tokenizer_data() -> Path:
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("SKYRL_TEST_DATA", default)) / "tokenizers"
    if not folder.is_dir():
        pytest.skip(f"no tokenizers at {folder}: set SKYRL_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def qwen(tokenizer_data: Path) -> Callable[..., Any]:
    """Qwen2.5's tokenizer with one of the real chat templates; `specials` are added to its vocabulary."""
    from transformers import AutoTokenizer

    base = AutoTokenizer.from_pretrained(tokenizer_data / "qwen2.5")

    def with_template(name: str, specials: tuple[str, ...] = (), end: str | None = None) -> Any:
        tokenizer = copy.deepcopy(base) if specials else copy.copy(base)
        tokenizer.chat_template = (tokenizer_data / "chat_templates" / f"{name}.jinja").read_text()
        if specials:
            tokenizer.add_special_tokens({"extra_special_tokens": list(specials)})
        if end:
            tokenizer.eos_token = end
        return tokenizer

    return with_template
