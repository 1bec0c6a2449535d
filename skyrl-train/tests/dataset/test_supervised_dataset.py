"""Demonstrations become ids and a mask: what is learnt is what the assistant wrote, its end included, nothing else."""

import json

import pytest
from transformers import AutoTokenizer

from skyrl_gym.chat.template import bundled_template
from skyrl_train.config.supervised import SupervisedDataConfig
from skyrl_train.dataset.supervised import Encoder, Example, SupervisedDataset
from skyrl_train.errors import ConfigError, DataError
from skyrl_train_testing.tiny_models import build_character_tokenizer

DIALOGUE = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
]
KINDS = ("chosen", "rejected")
FORGETS_THOUGHTS = (
    "{% for m in messages %}<start>{{ m['role'] }}:"
    "{{ m['content'] if loop.last else m['content'].split('/')[-1] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant:{% endif %}"
)


@pytest.fixture
def tokenizer(chat_model):
    return AutoTokenizer.from_pretrained(chat_model)


def learnt(tokenizer, example: Example) -> str:
    return tokenizer.decode([token for token, kept in zip(example.ids, example.mask, strict=True) if kept])


def write(tmp_path, rows) -> list[str]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return [str(path)]


@pytest.mark.parametrize(
    "train_on, expected",
    [
        ("all_assistant", "1<end>2<end>"),
        ("last_assistant", "2<end>"),
        ("all", "<start>user:one?<end><start>assistant:1<end><start>user:two?<end><start>assistant:2<end>"),
    ],
)
def test_trained_turns_of_conversation(tokenizer, train_on, expected):
    (example,) = Encoder(tokenizer, SupervisedDataConfig(train_on=train_on)).conversation(DIALOGUE, None)
    assert learnt(tokenizer, example) == expected
    assert tokenizer.decode(example.ids).startswith("<start>user:one?<end><start>assistant:1<end><start>user:two?")


def test_rewriting_template_gives_one_example_per_turn(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = FORGETS_THOUGHTS
    messages = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "hm/1"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "ah/2"},
    ]
    first, second = Encoder(tokenizer, SupervisedDataConfig()).conversation(messages, None)
    assert learnt(tokenizer, first) == "hm/1<end>"
    assert learnt(tokenizer, second) == "ah/2<end>"
    assert tokenizer.decode(second.ids) == "<start>user:one?<end><start>assistant:1<end>" + (
        "<start>user:two?<end><start>assistant:ah/2<end>"
    )


def test_alpaca_row_becomes_user_and_assistant_message(tokenizer, tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Say a.", "input": "", "output": "a"},
    ]
    dataset = SupervisedDataset(write(tmp_path, rows), tokenizer, SupervisedDataConfig())
    texts = [tokenizer.decode(example.ids) for (example,) in dataset]
    assert texts == [
        "<start>user:Add.\n\n1 2<end><start>assistant:3<end>",
        "<start>user:Say a.<end><start>assistant:a<end>",
    ]
    assert [learnt(tokenizer, example) for (example,) in dataset] == ["3<end>", "a<end>"]


def test_alpaca_rows_are_plain_text_without_chat_template(chat_model):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = None
    (example,) = Encoder(tokenizer, SupervisedDataConfig()).encode_prompt_and_response("Add.", "3")
    assert tokenizer.decode(example.ids) == "Add.\n\n3<end>"
    assert learnt(tokenizer, example) == "3<end>"


def test_preference_row_becomes_pair_with_shared_prompt(tokenizer, tmp_path):
    rows = [{"prompt": "q", "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}]}]
    config = SupervisedDataConfig(train_on="last_assistant")
    ((chosen, rejected),) = SupervisedDataset(write(tmp_path, rows), tokenizer, config, with_pairs=True)
    assert tokenizer.decode(chosen.ids) == "<start>user:q<end><start>assistant:yes<end>"
    assert learnt(tokenizer, chosen) == "yes<end>"
    assert learnt(tokenizer, rejected) == "no<end>"


SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    "prompt, before, text",
    [
        ("q", [USER], "<start>user:q<end>"),
        ("q\n", [USER], "<start>user:q<end>"),
        ([USER], [USER], "<start>user:q<end>"),
        ([SYSTEM, USER], [SYSTEM, USER], "<start>system:s<end><start>user:q<end>"),
        ([SYSTEM, USER], [USER], "<start>system:s<end><start>user:q<end>"),
        ([USER], [SYSTEM, USER], "<start>system:s<end><start>user:q<end>"),
        (None, [SYSTEM, USER], "<start>system:s<end><start>user:q<end>"),
        ([SYSTEM, USER], [], "<start>system:s<end><start>user:q<end>"),
    ],
)
def test_shared_prompt_of_preference_conversations_is_stored_once(tokenizer, tmp_path, prompt, before, text):
    rows = [{"prompt": prompt, **{kind: [*before, {"role": "assistant", "content": kind}] for kind in KINDS}}]
    config = SupervisedDataConfig(cache_dir=str(tmp_path))
    (pair,) = SupervisedDataset(write(tmp_path, rows), tokenizer, config, with_pairs=True)
    assert [tokenizer.decode(example.ids) for example in pair] == [f"{text}<start>assistant:{k}<end>" for k in KINDS]


def test_preference_pair_with_different_prompts_names_row(tokenizer, tmp_path):
    rows = [{"prompt": "other", **{kind: [USER, {"role": "assistant", "content": kind}] for kind in KINDS}}]
    with pytest.raises(DataError, match="row 0: chosen"):
        SupervisedDataset(write(tmp_path, rows), tokenizer, SupervisedDataConfig(), with_pairs=True)


@pytest.mark.parametrize(
    "chosen, rejected, settings",
    [("b", "b", {}), ("x" * 50 + "yes", "x" * 50 + "no", {"max_length": 60, "too_long": "truncate"})],
)
def test_pairs_without_difference_are_dropped_and_counted(tokenizer, tmp_path, log, chosen, rejected, settings):
    rows = [{"prompt": "q", "chosen": chosen, "rejected": rejected}, {"prompt": "q", "chosen": "b", "rejected": "bc"}]
    config = SupervisedDataConfig(cache_dir=str(tmp_path), **settings)
    ((first, second),) = SupervisedDataset(write(tmp_path, rows), tokenizer, config, with_pairs=True)
    assert (learnt(tokenizer, first), learnt(tokenizer, second)) == ("b<end>", "bc<end>")
    assert any("1 dropped: chosen and rejected are equal" in line for line in log)


def test_overlong_examples_are_dropped_or_truncated(tokenizer, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}
        for answer in ("a", "b" * 50)
    ]
    paths = write(tmp_path, rows)
    (short,) = SupervisedDataset(paths, tokenizer, SupervisedDataConfig(max_length=40))
    assert learnt(tokenizer, short[0]) == "a<end>"
    _, (cut,) = SupervisedDataset(paths, tokenizer, SupervisedDataConfig(max_length=40, too_long="truncate"))
    assert len(cut.ids) == 40
    assert set(learnt(tokenizer, cut)) == {"b"}


def test_rows_without_trained_tokens_are_dropped(tokenizer, tmp_path):
    rows = [{"messages": DIALOGUE[:1]}, {"messages": DIALOGUE[:2]}]
    assert len(SupervisedDataset(write(tmp_path, rows), tokenizer, SupervisedDataConfig())) == 1
    with pytest.raises(DataError, match=r"no usable example .*1 dropped: no token to train on"):
        SupervisedDataset(write(tmp_path, rows[:1]), tokenizer, SupervisedDataConfig())


@pytest.mark.parametrize(
    "row, settings, message",
    [
        ({"text": "a"}, {}, r"row 0 has the columns text; expected chat \(messages\) or preference"),
        ({"messages": DIALOGUE}, {"format": "alpaca"}, r"row 0 .*expected alpaca \(instruction, output\)"),
        ({"messages": "hello"}, {}, "row 0: messages is plain text"),
        ({"chosen": "a", "rejected": "b"}, {}, "skyrl_train.entrypoints.main_dpo"),
    ],
)
def test_rows_of_other_format_are_rejected_by_name(tokenizer, tmp_path, row, settings, message):
    with pytest.raises(DataError, match=message):
        SupervisedDataset(write(tmp_path, [row]), tokenizer, SupervisedDataConfig(**settings))


def test_slow_tokenizer_is_rejected(tokenizer):
    class Slow:
        is_fast = False

    with pytest.raises(ConfigError, match="fast tokenizer"):
        Encoder(Slow(), SupervisedDataConfig())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-nonthinking", "Qwen-Qwen3-Coder-30B-A3B-Instruct"],
)
def test_real_templates_train_response_and_end_token(test_data, template):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")
    tokenizer.chat_template = (test_data / "tokenizers" / "chat_templates" / f"{template}.jinja").read_text()
    tokenizer.eos_token = "<|im_end|>"
    examples = Encoder(tokenizer, SupervisedDataConfig()).conversation(DIALOGUE, None)
    learned = "".join(learnt(tokenizer, example) for example in examples)
    assert learned.replace("<think>\n\n</think>\n\n", "") == "1<|im_end|>2<|im_end|>"


def test_thinking_template_trains_reasoning_of_all_turns(test_data):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")
    tokenizer.chat_template = (test_data / "tokenizers" / "chat_templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    tokenizer.eos_token = "<|im_end|>"
    answers = ["<think>\nhm\n</think>\n\n1", "<think>\nah\n</think>\n\n2"]
    messages = [
        {"role": role, "content": content}
        for answer in answers
        for role, content in (("user", "next?"), ("assistant", answer))
    ]
    examples = Encoder(tokenizer, SupervisedDataConfig()).conversation(messages, None)
    assert [learnt(tokenizer, example) for example in examples] == [f"{answer}<|im_end|>" for answer in answers]


@pytest.mark.first_case
@pytest.mark.parametrize("train_on", ["all_assistant", "last_assistant"])
@pytest.mark.parametrize(
    "template",
    ["qwen3_without_thinking", "Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"],
)
def test_rewriting_templates_train_responses_only(test_data, template, train_on):
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen2.5")
    path = test_data / "tokenizers" / "chat_templates" / f"{template}.jinja"
    tokenizer.chat_template = path.read_text() if path.is_file() else bundled_template(template)
    end = "<｜end▁of▁sentence｜>" if "DeepSeek" in template else "<|im_end|>"
    tokenizer.add_special_tokens({"eos_token": end})
    messages = [
        {"role": role, "content": content}
        for role, content in (
            ("user", "one"),
            ("assistant", "<think>\nx\n</think>\n\nA."),
            ("tool", "TOOL OUTPUT"),
            ("assistant", "<think>\ny\n</think>\n\nB."),
            ("user", "USER TEXT"),
            ("assistant", "<think>\nz\n</think>\n\nC."),
        )
    ]
    examples = Encoder(tokenizer, SupervisedDataConfig(train_on=train_on)).conversation(messages, None)
    learned = "".join(learnt(tokenizer, example) for example in examples)
    answers = learned.split(end)[:-1]
    assert [answer[-2:] for answer in answers] == (["A.", "B.", "C."] if train_on == "all_assistant" else ["C."])
    assert not any(word in learned for word in ("TEXT", "OUTPUT", "user", "tool", "assistant"))


def test_responses_are_trained_after_inference_time_context(tokenizer):
    tokenizer.chat_template = FORGETS_THOUGHTS
    answers = ["hm/1", "ah/2", "oh/3"]
    messages = [{"role": r, "content": c} for a in answers for r, c in (("user", "next?"), ("assistant", a))]
    examples = Encoder(tokenizer, SupervisedDataConfig()).conversation(messages, None)
    for example, number in zip(examples, (1, 3, 5), strict=True):
        seen = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(example.ids) == f"{seen}{messages[number]['content']}<end>"


def test_conversation_started_by_assistant_trains_no_header(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}<start>system:default<end>{% endif %}"
        "{% for m in messages %}<start>{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant:{% endif %}"
    )
    (example,) = Encoder(tokenizer, SupervisedDataConfig()).conversation(DIALOGUE[1:], None)
    assert learnt(tokenizer, example) == "1<end>2<end>"
    assert tokenizer.decode(example.ids).startswith("<start>system:default<end><start>assistant:1<end>")


def header_tokenizer(folder, eos_ids):
    """Turns end with the next header, as in GLM: `<|user|>`, or `<|tool|>` after a call."""
    tokenizer = build_character_tokenizer("", added_tokens=["<|user|>", "<|tool|>", "<|assistant|>"])
    tokenizer.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}" + (
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    tokenizer.name_or_path = str(folder)
    return tokenizer


def test_turn_ended_by_next_header_trains_that_header(tmp_path):
    call = {"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [DIALOGUE[0], call, {"role": "tool", "content": "t"}, *DIALOGUE[1:]]
    tokenizer = header_tokenizer(tmp_path, [1, 99, 100])
    (example,) = Encoder(tokenizer, SupervisedDataConfig()).conversation(messages, None)
    assert learnt(tokenizer, example) == "c<|tool|>1<|user|>2<|user|>"
    (example,) = Encoder(tokenizer, SupervisedDataConfig(train_on="all")).conversation(messages, None)
    assert learnt(tokenizer, example).endswith("<|assistant|>2<|user|>")


def test_turn_trains_eos_when_next_header_is_not_end(tmp_path):
    tokenizer = header_tokenizer(tmp_path, 1)
    examples = Encoder(tokenizer, SupervisedDataConfig()).conversation(DIALOGUE, None)
    assert [learnt(tokenizer, example) for example in examples] == ["1<end>", "2<end>"]
    assert tokenizer.decode(examples[1].ids) == "<|user|>one?<|assistant|>1<|user|>two?<|assistant|>2<end>"
