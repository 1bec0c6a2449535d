"""Messages to ids, and which of them an assistant wrote, with real tokenizers and real chat templates."""

import json

import pytest

from skyrl_gym.chat.template import bundled_template
from skyrl_train.config import ChatTemplateConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.tokenization import ChatFormat
from skyrl_train.generators.utils import (
    CUSTOM_CHAT_TEMPLATES,
    encode_messages_subset,
    get_custom_chat_template,
    get_generation_prompt_ids,
    get_response_ids_and_loss_mask_from_messages,
)

USER = {"role": "user", "content": "1+1?"}
ASSISTANT = {"role": "assistant", "content": "2"}
CHATML_TEMPLATES = ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen-QwQ-32B"]


@pytest.mark.parametrize("template", CHATML_TEMPLATES)
def test_generation_prompt_matches_template(qwen, template):
    tokenizer = qwen(template)
    ids = get_generation_prompt_ids(tokenizer)
    assert tokenizer.decode(ids).startswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("template", CHATML_TEMPLATES[:2])
def test_separately_encoded_messages_concatenate_to_conversation(qwen, template):
    tokenizer = qwen(template)
    system = [{"role": "system", "content": "Be brief."}]
    tool = {"role": "tool", "content": "2"}
    head = tokenizer.apply_chat_template([*system, USER], return_dict=False)
    whole = tokenizer.apply_chat_template([*system, USER, ASSISTANT, tool], return_dict=False)
    rest = encode_messages_subset([ASSISTANT, tool], tokenizer)
    assert head + rest == whole or template == "Qwen-Qwen3-0.6B"  # that one puts empty thoughts into the last answer
    assert tokenizer.decode(encode_messages_subset([USER], tokenizer)) == "<|im_start|>user\n1+1?<|im_end|>\n"


def test_loss_mask_covers_assistant_tokens(characters):
    ids, mask, logprobs = get_response_ids_and_loss_mask_from_messages(
        [ASSISTANT, USER, ASSISTANT], characters, assistant_logprobs=[[-1.0, -2.0], [-3.0, -4.0]]
    )
    assert characters.decode(ids) == (
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )
    assert characters.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "2<|im_end|>2<|im_end|>"
    assert logprobs is not None and len(logprobs) == len(ids)
    assert [p for p, m in zip(logprobs, mask, strict=True) if m] == [-1.0, -2.0, -3.0, -4.0]
    assert not any(p for p, m in zip(logprobs, mask, strict=True) if not m)


@pytest.mark.parametrize("template", ["Qwen-Qwen2.5-7B-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "acc"])
def test_text_messages_match_conversation_with_parallel_results(qwen, template):
    tokenizer = qwen("Qwen-Qwen3-0.6B" if template == "acc" else template)
    tokenizer.chat_template = bundled_template("qwen3_acc_thinking") if template == "acc" else tokenizer.chat_template
    results = [{"role": "tool", "content": text} for text in ("one", "two")]
    said = [ASSISTANT, *results, ASSISTANT, USER, ASSISTANT]
    before = tokenizer.apply_chat_template([USER], tokenize=False)
    whole = tokenizer.apply_chat_template([USER, *said], tokenize=False)
    ids, mask, _ = get_response_ids_and_loss_mask_from_messages(said, tokenizer)
    assert before + tokenizer.decode(ids) == whole
    learned = tokenizer.decode([id for id, flag in zip(ids, mask, strict=True) if flag])
    assert learned.count("2") == 3 and not any(word in learned for word in ("one", "two", "user"))


@pytest.mark.parametrize(
    "messages, logprobs, message",
    [
        ([], None, "messages list cannot be empty"),
        ([{"role": "system", "content": "x"}], None, "Expected message role to be 'user' or 'assistant'"),
        ([ASSISTANT], [], "Missing logprobs for assistant message #1"),
        ([ASSISTANT], [[-1.0]], r"Logprobs count \(1\) does not match token count \(2\)"),
    ],
)
def test_unencodable_messages_raise(characters, messages, logprobs, message):
    with pytest.raises(ValueError, match=message):
        get_response_ids_and_loss_mask_from_messages(messages, characters, logprobs)


def test_supported_real_templates_can_be_continued(qwen, test_data):
    """Tokens between two responses are those that the template renders there in the whole conversation."""
    question, reply = {"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}
    answer = {"role": "assistant", "content": "Seventeen."}
    continued, refused = [], {}
    for path in sorted((test_data / "tokenizers" / "chat_templates").glob("*.jinja")):
        tokenizer = qwen(path.stem)
        try:
            chat = ChatFormat(tokenizer)
            before = chat.text([question, answer])
            whole = chat.text([question, answer, reply], add_generation_prompt=True)
        except (ConfigError, ValueError) as error:
            refused[path.stem] = str(error)
            continue
        between = tokenizer.decode(chat.get_continuation_ids([reply], answer_is_closed=False))
        assert "Seventeen." in before and whole.endswith(between), path.stem
        assert "Two?" in between, path.stem
        continued.append(path.stem)
    assert len(continued) >= 8, refused


def test_template_and_keywords_without_conversation_support_are_refused(characters):
    with pytest.raises(ConfigError, match="drops assistant messages"):
        ChatFormat(characters, "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        ChatFormat(characters, "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.mark.parametrize("name", sorted(CUSTOM_CHAT_TEMPLATES))
def test_shipped_templates_are_chatml(qwen, name):
    tokenizer = qwen("Qwen-Qwen2.5-7B-Instruct")
    conversation = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "<think>x</think>\n\n2"}]
    ours = tokenizer.apply_chat_template(
        conversation, chat_template=CUSTOM_CHAT_TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )
    assert ours == tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)


def test_custom_template_loads_by_name_or_file(tmp_path):
    assert get_custom_chat_template(ChatTemplateConfig()) is None
    path = tmp_path / "template.jinja"
    path.write_text("hi")
    assert get_custom_chat_template(ChatTemplateConfig(source="file", name_or_path=str(path))) == "hi"
    named = get_custom_chat_template(ChatTemplateConfig(name_or_path="qwen3_with_thinking"))
    assert named == CUSTOM_CHAT_TEMPLATES["qwen3_with_thinking"]


@pytest.mark.parametrize(
    "source, name_or_path, message",
    [
        ("name", "qwen4", "qwen3_with_thinking, qwen3_without_thinking"),
        ("file", "no/such/file.jinja", "is not a file"),
        ("file", "a\0b", "null byte"),
    ],
)
def test_missing_custom_template_raises(source, name_or_path, message):
    config = ChatTemplateConfig()
    config.source, config.name_or_path = source, name_or_path  # as settings made in Python may be
    with pytest.raises(ConfigError, match=message):
        get_custom_chat_template(config)


def test_custom_template_larger_than_megabyte_is_refused(tmp_path):
    path = tmp_path / "big.jinja"
    path.write_text("x" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="1048577 bytes"):
        get_custom_chat_template(ChatTemplateConfig(source="file", name_or_path=str(path)))


def test_real_contexts_render_to_ids_with_same_text(qwen, test_data):
    tokenizer = qwen("Qwen-Qwen2.5-7B-Instruct")
    context = json.loads((test_data / "tokenizers" / "template_contexts" / "simple.json").read_text())
    chat = ChatFormat(tokenizer)
    assert tokenizer.decode(chat.ids(context["messages"])) == chat.text(context["messages"])
