"""Text to tokens and back, as transformers does it, without transformers."""

import json

import pytest

from tx.errors import RequestError
from tx.tinker.texts import Texts

MESSAGES = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "!"},
]


def test_text_and_chats_tokenize_like_transformers(tiny_model):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_model)
    texts = Texts(tiny_model)
    assert texts.encode("Hello, world") == theirs("Hello, world")["input_ids"]
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert texts.encode_chat(MESSAGES) == chat
    assert texts.decode(texts.encode("Hello, world")) == "Hello, world"
    assert texts.decode_each([44, 1]) == ["H", "<end>"]


def test_chat_template_may_be_in_tokenizer_config_and_refuse_messages(tmp_path, tiny_model):
    (tmp_path / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ eos_token }}ab"
    settings = {"chat_template": template, "eos_token": {"content": "<end>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Texts(tmp_path).encode_chat(MESSAGES) == [1, 69, 70]
    with pytest.raises(RequestError, match="user first"):
        Texts(tmp_path).encode_chat(MESSAGES[1:])


def test_error_without_tokenizer_or_template_suggests_alternative(tmp_path):
    with pytest.raises(RequestError, match="prompt"):
        Texts(tmp_path).encode("x")
    with pytest.raises(RequestError, match="use completions"):
        Texts(tmp_path).encode_chat(MESSAGES)
