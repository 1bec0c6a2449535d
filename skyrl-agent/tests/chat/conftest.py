"""Real tokenizers with real chat templates, and a model that answers in their spelling."""

import copy
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_TAG = re.compile(r"<｜[^｜]+｜>|<\|[a-z_]+\|>|\[/?[A-Z][A-Z_]+\]")


@pytest.fixture(scope="session")
def tokenizer_data() -> Path:
    default = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(os.environ.get("SKYRL_TEST_DATA", default)) / "tokenizers"
    if not folder.is_dir():
        pytest.skip(f"no tokenizers at {folder}: set SKYRL_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def qwen(tokenizer_data: Path) -> Callable[..., Any]:
    """Qwen2.5's tokenizer with one of the real chat templates. The tags of all templates are special tokens of it, as
    they are for the models that the templates are made for."""
    from transformers import AutoTokenizer

    templates = {path.stem: path.read_text() for path in (tokenizer_data / "chat_templates").glob("*.jinja")}
    specials = list(dict.fromkeys(_TAG.findall("".join(templates.values()))))

    @cache
    def ending_in(eos_token: str) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_data / "qwen2.5", eos_token=eos_token, extra_special_tokens=specials
        )
        tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        return tokenizer

    def with_template(name: str, eos_token: str = "<|im_end|>") -> Any:
        tokenizer = copy.copy(ending_in(eos_token))
        tokenizer.chat_template = templates[name]
        return tokenizer

    return with_template
