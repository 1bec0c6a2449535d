"""Ends of a turn, as the tokenizer, files of the model and the chat template define them."""

import json

import pytest

pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from skyrl_gym.chat.template import ChatTemplate, bundled_template, turn_ends_of

BODY = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
HEADERS = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
GPT_OSS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
)


def tokenizer(template, eos="<|endoftext|>", specials=(), folder=None):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, additional_special_tokens=[*specials])
    made.chat_template = template
    if folder is not None:
        made.name_or_path = str(folder)
    return made


@pytest.mark.parametrize(
    "template, specials, closing, ends",
    [
        (BODY.replace("END", "<|im_end|>\n"), ("<|im_end|>",), "<|im_end|>", {"<|endoftext|>", "<|im_end|>"}),
        (BODY.replace("END", " <|endoftext|>"), (), "<|endoftext|>", {"<|endoftext|>"}),  # Llama 2: a space before
        (BODY.replace("END", "<|im_end|>\n"), (), "<|im_end|>", {"<|endoftext|>"}),  # no token of its own
        (BODY.replace("END", "<|a|><|b|>"), ("<|a|>", "<|b|>"), "<|a|><|b|>", {"<|endoftext|>", "<|b|>"}),  # Command-R
        (HEADERS, ("<|user|>", "<|assistant|>"), "", {"<|endoftext|>", "<|user|>"}),  # GLM: the next header
        (GPT_OSS, ("<|return|>", "<|end|>"), "<|return|>", {"<|endoftext|>", "<|return|>"}),
        ("{{ raise_exception('no') }}", (), "", {"<|endoftext|>"}),
        (None, (), "", {"<|endoftext|>"}),
    ],
)
def test_turn_ends_follow_template(template, specials, closing, ends):
    made = tokenizer(template, specials=specials)
    found = turn_ends_of(made)
    assert found.closing == closing
    assert {*found.tokens} == ends
    assert found.ids == {made.get_vocab()[end] for end in ends}


def test_turn_ends_include_ids_of_model_files(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    found = turn_ends_of(tokenizer(None, folder=tmp_path))
    assert found.ids >= {3, 4, 5} and found.declared >= {3, 4} and 5 not in found.declared
    (tmp_path / "generation_config.json").write_text("[not JSON")
    assert 5 in turn_ends_of(tokenizer(None, folder=tmp_path)).declared


def test_stop_ids_known_only_to_template_are_added(tmp_path):
    made = tokenizer(BODY.replace("END", "<|im_end|>"), specials=("<|im_end|>",), folder=tmp_path)
    end = made.convert_tokens_to_ids("<|im_end|>")
    assert turn_ends_of(made).add_stop_ids({"stop_token_ids": [7]}) == {"stop_token_ids": [7, end]}
    assert turn_ends_of(made).add_stop_ids({"ignore_eos": True}) == {"ignore_eos": True}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    assert ChatTemplate(made).turn_ends.add_stop_ids({}) == {}


def test_closing_at_start_of_text_is_measured():
    ends = turn_ends_of(tokenizer(GPT_OSS, specials=("<|return|>", "<|end|>")))
    assert ends.count_leading_characters("<|end|><|start|>user", None) == len("<|end|>")
    made = tokenizer(HEADERS, specials=("<|user|>", "<|assistant|>"))
    user, eos = made.get_vocab()["<|user|>"], made.get_vocab()["<|endoftext|>"]
    assert turn_ends_of(made).count_leading_characters("<|user|>\nhi", user) == len("<|user|>")
    assert turn_ends_of(made).count_leading_characters("<|user|>\nhi", eos) == 0  # the header is still to be written


@pytest.mark.parametrize("name", ["qwen3_with_thinking", "qwen3_without_thinking", "qwen3_acc_thinking"])
def test_bundled_templates_end_with_im_end(name):
    assert turn_ends_of(tokenizer(bundled_template(name), specials=("<|im_end|>",))).closing == "<|im_end|>"
